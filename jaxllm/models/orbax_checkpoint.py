"""Parameters in Orbax's format: written from any mesh, restored straight to any other, each device only its part.

One Orbax checkpoint has every parameter by its dotted path, with the shape it has on one device. Invariant: what is
restored is bit for bit what was written. Host memory holds a few chunks of arrays at a time, not a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from tqdm import tqdm

from jaxllm.config import ModelConfig
from jaxllm.models.expansion import Expansion, stored_specs

BYTES_AT_ONCE = 1 << 28
"""Of parameters that are restored together: GPUs read them from pinned buffers, which stay."""
CONCURRENT_GB = 1
"""What Orbax may hold in host memory, unless an array alone is larger: it takes no part of one."""
CHUNK_BYTES = 32 << 20
"""Arrays are cut into chunks so that a device need not read what belongs to others."""


def write_params(path: Path, params: Mapping[str, jax.Array]) -> None:
    """Writes parameters to a new folder, all or nothing.

    Args:
        params: with the shapes of `stored_specs`, on any mesh.
    """
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in params}
    with ocp.Checkpointer(_handler(params)) as checkpointer:
        checkpointer.save(path.absolute(), ocp.args.PyTreeSave(dict(params), save_args))


def restore_params(
    path: Path, model: ModelConfig, specs: Mapping[str, jax.ShapeDtypeStruct], progress: bool = True
) -> dict[str, jax.Array]:
    """Every parameter of `specs`, by dotted path, with the shape, dtype and sharding its spec asks for.

    Args:
        path: of `write_params`.
        model: as the checkpoint has it.
        progress: show a bar, if standard error is a terminal.

    Raises:
        ValueError: other parameters lie there.
    """
    stored, params = stored_specs(specs, model), {}
    total = sum(map(_num_bytes, stored.values()))
    # disable=None: no bar where standard error is not a terminal.
    disable = None if progress else True
    bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=disable, leave=False)
    with bar, ocp.Checkpointer(_handler(stored)) as checkpointer:
        _check(checkpointer, path, stored)
        for batch in _batches(stored):
            restored = _restore(checkpointer, path, batch)
            for name in batch:
                params[name] = _expand(Expansion.of(name, specs[name], model), restored.pop(name), specs[name])
            bar.update(sum(map(_num_bytes, batch.values())))
    return params


def _handler(arrays: Mapping[str, jax.ShapeDtypeStruct | jax.Array]) -> ocp.PyTreeCheckpointHandler:
    gigabytes = concurrent_gb(arrays)
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,  # it makes weights hardly smaller, only slower
        restore_concurrent_gb=gigabytes,
        save_concurrent_gb=gigabytes,
        save_device_host_concurrent_gb=gigabytes,
    )


def concurrent_gb(arrays: Mapping[str, jax.ShapeDtypeStruct | jax.Array]) -> int:
    """Gigabytes (10^9) that Orbax has to be allowed to hold for these arrays."""
    return max(CONCURRENT_GB, math.ceil(max(map(_num_bytes, arrays.values())) / 10**9))


def _check(checkpointer: ocp.Checkpointer, path: Path, stored: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    metadata = checkpointer.metadata(path.absolute()).item_metadata
    if metadata is None:
        raise ValueError(f"{path} is not whole: convert the model again")
    found = {name: tuple(array.shape) for name, array in metadata.items()}
    wrong = [name for name, spec in stored.items() if found.get(name) != spec.shape]
    wrong += sorted(found.keys() - stored.keys())
    if wrong:
        raise ValueError(f"{path} holds other parameters than its model has ({', '.join(wrong[:3])}): convert it again")


def _restore(
    checkpointer: ocp.Checkpointer, path: Path, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    arguments = {
        name: ocp.ArrayRestoreArgs(sharding=spec.sharding, global_shape=spec.shape, dtype=spec.dtype)
        for name, spec in batch.items()
    }
    request = ocp.args.PyTreeRestore(dict(batch), arguments, partial_restore=True)
    return jax.block_until_ready(checkpointer.restore(path.absolute(), request))


def _expand(expansion: Expansion, stored: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """The parameter as the devices hold it; where that is another array, what was stored is freed."""
    if expansion.changes_nothing:
        return stored
    expanded = jax.block_until_ready(jax.jit(expansion.apply, out_shardings=spec.sharding)(stored))
    stored.delete()
    return expanded


def _batches(specs: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """The same specs in order, in runs of at most BYTES_AT_ONCE, or one that is larger."""
    batch, size = {}, 0
    for name, spec in specs.items():
        if batch and size + _num_bytes(spec) > BYTES_AT_ONCE:
            yield batch
            batch, size = {}, 0
        batch[name] = spec
        size += _num_bytes(spec)
    if batch:
        yield batch


def _num_bytes(spec: jax.ShapeDtypeStruct | jax.Array) -> int:
    return spec.size * spec.dtype.itemsize
