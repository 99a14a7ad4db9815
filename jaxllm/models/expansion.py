"""From parameters as a checkpoint has them to parameters as the devices hold them, and nothing else.

They differ where a model cannot be split evenly (`jaxllm.parallel.partition`): heads are repeated or padded, the
intermediate size and the vocabulary are padded. Invariant: numbers are copied or zero, never computed, so that
every way to load a model gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.model_config import ModelConfig
from jaxllm.parallel.partition import EMPTY, HeadPlacement, place_heads
from jaxllm.parallel.sharding import REPLICATED

type Sizes = tuple[int, ...]


@dataclass(frozen=True)
class _Kind:
    """What a parameter is, as far as it matters here: which of its axes may differ."""

    axis: int
    """The first of them."""
    stored: Callable[[ModelConfig], Sizes]
    """Their sizes in a checkpoint."""
    places: Callable[[HeadPlacement, Sizes], list[int]]
    """For their sizes on the devices: where each number lies in the stored axes, flattened; EMPTY is 0."""


@dataclass(frozen=True)
class Expansion:
    """What happens to one parameter on its way."""

    kind: str | None
    """The key of its `_Kind`; None: the devices hold it as it is."""
    shape: Sizes
    """On the devices, or the stored one."""
    num_devices: int
    model: ModelConfig
    """As the checkpoint has it."""

    @classmethod
    def of(cls, path: str, spec: jax.ShapeDtypeStruct, model: ModelConfig) -> Expansion:
        """Of the parameter at this dotted path, which is to be like `spec`."""
        kind = _kind_of(path)
        num_devices = spec.sharding.mesh.size if isinstance(spec.sharding, NamedSharding) else 1
        return cls(kind if kind in _KINDS else None, spec.shape, num_devices, model)

    @property
    def stored_shape(self) -> Sizes:
        """Shape in a checkpoint."""
        if self.kind is None:
            return self.shape
        axis, stored = self._axis, self._stored
        return (*self.shape[:axis], *stored, *self.shape[axis + len(stored) :])

    @property
    def changes_nothing(self) -> bool:
        return self.shape == self.stored_shape

    def apply[T: (np.ndarray, jax.Array)](self, stored: T) -> T:
        """The parameter as the devices hold it; the same array if nothing changes.

        Args:
            stored: with `stored_shape`; NumPy's, or JAX's (inside jit, too).
        """
        if self.changes_nothing:
            return stored
        numpy, axis, index = np if isinstance(stored, np.ndarray) else jnp, self._axis, self._index
        before, after = self.shape[:axis], self.shape[axis + len(self._stored) :]
        flat = stored.reshape(*before, prod(self._stored), *after)
        taken = numpy.take(flat, np.maximum(index, 0), axis=axis)
        exists = (index != EMPTY).reshape(-1, *(1,) * len(after))
        if not exists.all():
            taken = numpy.where(exists, taken, numpy.zeros((), stored.dtype))
        return cast(T, taken.reshape(self.shape))

    @property
    def _axis(self) -> int:
        assert self.kind is not None
        return _KINDS[self.kind].axis

    @property
    def _stored(self) -> Sizes:
        """Sizes in a checkpoint of the axes that differ."""
        assert self.kind is not None
        return _KINDS[self.kind].stored(self.model)

    @property
    def _index(self) -> np.ndarray:
        assert self.kind is not None
        sizes = self.shape[self._axis : self._axis + len(self._stored)]
        index = np.array(_KINDS[self.kind].places(place_heads(self.model, self.num_devices), sizes))
        return np.where(index < prod(self._stored), index, EMPTY)


def stored_specs(specs: Mapping[str, jax.ShapeDtypeStruct], model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Specs of the same parameters as a checkpoint has them; what the devices cannot share evenly each has whole."""
    return {path: _stored_spec(spec, Expansion.of(path, spec, model).stored_shape) for path, spec in specs.items()}


def whole_axis(path: str) -> int:
    """An axis of the parameter at this dotted path that every device has whole, on any mesh: the first or the last."""
    kind = _KINDS.get(_kind_of(path))
    return -1 if kind is not None and kind.axis == 0 else 0


def _kind_of(path: str) -> str:
    return ".".join(path.split(".")[-3:])


def _stored_spec(spec: jax.ShapeDtypeStruct, shape: Sizes) -> jax.ShapeDtypeStruct:
    sharding = spec.sharding
    assert isinstance(sharding, NamedSharding), "a parameter without a place"
    split = zip(shape, sharding.spec, strict=False)
    if any(axis is not None and size % sharding.mesh.shape[axis] for size, axis in split):
        sharding = NamedSharding(sharding.mesh, REPLICATED)
    return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=sharding)


def _grouped(heads: HeadPlacement, sizes: Sizes, others: int) -> list[int]:
    """Of [kv_heads, qkv]: a K/V head's queries, then `others`: its key and, in projections, its value."""
    width = heads.group + others
    index = []
    for place in range(sizes[0]):
        head = heads.kv_head(place)
        queries = [heads.query_head(place, number) for number in range(heads.group_places)]
        index += [EMPTY if query == EMPTY else query // heads.group * width + query % heads.group for query in queries]
        index += [EMPTY if head == EMPTY else head * width + heads.group + other for other in range(others)]
    return index


def _query_heads(heads: HeadPlacement, sizes: Sizes) -> list[int]:
    """Of [heads]."""
    return [heads.query_head(*divmod(place, heads.group_places)) for place in range(sizes[0])]


def _scales(heads: HeadPlacement, sizes: Sizes) -> list[int]:
    """Of [qk], where all queries have the same scale, or of [kv_heads, qk]."""
    return [*range(sizes[0] - 1), heads.group] if len(sizes) == 1 else _grouped(heads, sizes, others=1)


def _scale_sizes(model: ModelConfig) -> Sizes:
    of_one_head = (model.group_size + 1,)
    return (model.num_kv_heads, *of_one_head) if model.qk_norm == "all" else of_one_head


def _as_it_is(_: HeadPlacement, sizes: Sizes) -> list[int]:
    """Of one axis; what is past its stored size is padding."""
    return list(range(sizes[0]))


_QKV = _Kind(0, lambda model: (model.num_kv_heads, model.group_size + 2), partial(_grouped, others=2))
_VOCABULARY = _Kind(0, lambda model: (model.vocab_size,), _as_it_is)
_INTERMEDIATE = _Kind(0, lambda model: (model.intermediate_size,), _as_it_is)

_KINDS: Mapping[str, _Kind] = {
    "embed.weight": _VOCABULARY,
    "lm_head.weight": _VOCABULARY,
    "attention.qkv.weight": _QKV,
    "attention.qkv.bias": _QKV,
    "attention.qk_norm.scale": _Kind(0, _scale_sizes, _scales),
    "attention.out.weight": _Kind(1, lambda model: (model.num_heads,), _query_heads),
    "mlp.gate_up.weight": _INTERMEDIATE,
    "mlp.gate_up.bias": _INTERMEDIATE,
    "mlp.down.weight": _Kind(1, _INTERMEDIATE.stored, _as_it_is),
}
"""By the path's end."""
