"""Weights from a checkpoint to the devices.

Parameters are assembled one after the other and put where they belong at once: host memory holds a few
of them, never the whole model beside its copy on the devices. Every tensor of the checkpoint is used
exactly once or known to be harmless, so a wrong model cannot load quietly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from math import prod
from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from jaxllm.models.checkpoint import Checkpoint
from jaxllm.models.expansion import Expansion

READERS = 2
"""Parameters being read and assembled at the same time."""

_ALIGNMENT = 64


class _Part(NamedTuple):
    """The place of one tensor in a parameter."""

    view: np.ndarray
    """Of the parameter's array; what is assigned to it lands where it belongs."""
    shape: tuple[int, ...]
    """Shape the tensor has in the checkpoint."""


type _Layout = Callable[[np.ndarray], list[_Part]]


def load_params(
    checkpoint: Checkpoint, specs: Mapping[str, jax.ShapeDtypeStruct], progress: bool = True
) -> dict[str, jax.Array]:
    """Every parameter of `specs`, by dotted path, with the shape, dtype and sharding its spec asks for.

    Args:
        checkpoint: an open checkpoint.
        specs: by path, as "layers.0.mlp.down.weight".
        progress: show a bar, if standard error is a terminal.

    Raises:
        ValueError: tensors are missing, unused or misshapen; the message names them.
    """
    _check_tensors(checkpoint, specs)
    params = {}
    total = sum(_num_bytes(spec) for spec in specs.values())
    # disable=None: no bar where standard error is not a terminal.
    disable = None if progress else True
    with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=disable, leave=False) as bar:
        for path, host in _assemble_ahead(checkpoint, specs):
            params[path] = _put(host, specs[path])
            bar.update(_num_bytes(specs[path]))
    return params


def _num_bytes(spec: jax.ShapeDtypeStruct) -> int:
    return spec.size * spec.dtype.itemsize


def _put(host: np.ndarray, spec: jax.ShapeDtypeStruct) -> jax.Array:
    if spec.sharding is None:
        return jax.block_until_ready(jax.device_put(host))
    array = jax.make_array_from_callback(spec.shape, spec.sharding, lambda index: host[index])
    return jax.block_until_ready(array)  # a queue of copies would keep their host arrays alive


def _assemble_ahead(
    checkpoint: Checkpoint, specs: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, np.ndarray]]:
    """Paths and host arrays in order, the next few being assembled in threads meanwhile."""
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        for path, spec in specs.items():
            waiting.append((path, pool.submit(_assemble, checkpoint, path, spec)))
            if len(waiting) > READERS:
                yield _result(waiting)
        while waiting:
            yield _result(waiting)


def _result(waiting: deque[tuple[str, Future[np.ndarray]]]) -> tuple[str, np.ndarray]:
    path, future = waiting.popleft()
    return path, future.result()


def _assemble(checkpoint: Checkpoint, path: str, spec: jax.ShapeDtypeStruct) -> np.ndarray:
    """Host array of one parameter, from the tensors it is made of."""
    expansion = Expansion.of(path, spec, checkpoint.config)
    param = _aligned_empty(expansion.stored_shape, spec.dtype)
    parts = _layout(path)(param)
    for part, tensor in zip(parts, _read(checkpoint, path, parts), strict=True):
        # A scale that several heads share is written to each of them.
        shared = part.view.size > tensor.size
        part.view[...] = tensor.reshape(part.view.shape[shared:])  # casts, too
    return expansion.apply(param)


def _read(checkpoint: Checkpoint, path: str, parts: Sequence[_Part]) -> list[np.ndarray]:
    """The tensor of every part."""
    names = checkpoint.names.sources_of(path)
    tensors = [checkpoint.names.correct(name, checkpoint.read(name)) for name in names]
    if len(names) == len(parts):
        return tensors
    (tensor,) = tensors
    return np.split(tensor, list(accumulate(part.shape[0] for part in parts[:-1])))


def _expected(names: Sequence[str], parts: Sequence[_Part]) -> dict[str, tuple[int, ...]]:
    """Shapes of a parameter's tensors: one for each part, or a single one in which they lie below one another."""
    if len(names) == 1:
        return {names[0]: (sum(part.shape[0] for part in parts), *parts[0].shape[1:])}
    return {name: part.shape for name, part in zip(names, parts, strict=True)}


def _aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX on a CPU takes over as it is; less aligned arrays it copies."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _whole(param: np.ndarray) -> list[_Part]:
    return [_Part(param, param.shape)]


def _qkv(param: np.ndarray) -> list[_Part]:
    """Of [kv_heads, group + 2, head_dim, ...]: q, k and v as [heads * head_dim, ...]."""
    views = (param[:, :-2], param[:, -2], param[:, -1])
    rest = param.shape[3:]
    return [_Part(view, (view.size // prod(rest), *rest)) for view in views]


def _gate_up(param: np.ndarray) -> list[_Part]:
    """Of [intermediate, 2, ...]: gate and up, row by row."""
    return [_Part(view, view.shape) for view in (param[:, 0], param[:, 1])]


def _joined_inputs(param: np.ndarray) -> list[_Part]:
    """Of [out, *in]: one tensor as [out, in]."""
    return [_Part(param, (param.shape[0], prod(param.shape[1:])))]


def _qk_norm(param: np.ndarray) -> list[_Part]:
    """Of [group + 1, head_dim]: scales of any query's and any key's head; of [kv_heads, ...]: of all their heads."""
    queries, keys = param[..., :-1, :], param[..., -1, :]
    if param.ndim == 2:
        return [_Part(queries, keys.shape), _Part(keys, keys.shape)]
    return [_Part(view, (view.size,)) for view in (queries, keys)]


_LAYOUTS: Mapping[str, _Layout] = {
    "attention.qkv.weight": _qkv,
    "attention.qkv.bias": _qkv,
    "attention.qk_norm.scale": _qk_norm,
    "attention.out.weight": _joined_inputs,
    "mlp.gate_up.weight": _gate_up,
    "mlp.gate_up.bias": _gate_up,
}
"""By the path's end; every other parameter is one tensor as it is."""


def _layout(path: str) -> _Layout:
    return _LAYOUTS.get(".".join(path.split(".")[-3:]), _whole)


def _check_tensors(checkpoint: Checkpoint, specs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Compares names and shapes of all tensors with what the parameters need, before anything is read."""
    expected = {
        name: shape
        for path, spec in specs.items()
        for name, shape in _expected(checkpoint.names.sources_of(path), _parts_of(checkpoint, path, spec)).items()
    }
    found = checkpoint.shapes
    misshapen = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    unused = [
        name for name in found.keys() - expected.keys() if not checkpoint.names.is_ignored(name, checkpoint.config)
    ]
    problems = {
        "missing": [name for name in expected if name not in found],
        "misshapen": misshapen,
        "unused": sorted(unused),
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {_first_few(names)}" for kind, names in problems.items() if names)
        raise ValueError(
            f"{checkpoint.path} does not hold the tensors of a {checkpoint.family.name} model of its configuration: "
            f"{listed}. Download it again, or check its configuration"
        )


def _parts_of(checkpoint: Checkpoint, path: str, spec: jax.ShapeDtypeStruct) -> list[_Part]:
    shape = Expansion.of(path, spec, checkpoint.config).stored_shape
    # A broadcast array has the shape without the memory.
    return _layout(path)(np.broadcast_to(np.empty((), spec.dtype), shape))


def _first_few(names: Sequence[str], count: int = 3) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
