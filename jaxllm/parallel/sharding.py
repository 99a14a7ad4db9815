"""Where every array lies on the mesh: logical axis names to mesh axes, in one table."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.parallel.mesh import TENSOR_AXIS

AXIS_RULES: dict[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "intermediate": TENSOR_AXIS,
    "hidden": None,
    "head_dim": None,
    "cached": None,
    "blocks": None,
    "block_size": None,
    "splits": None,
    "tokens": None,
    "qkv": None,
    "gate_up": None,
}
"""A logical axis that is not listed is an error, so that none is replicated by accident."""

KV_CACHE_AXES = ("blocks", "block_size", "kv_heads", "head_dim")
KV_CHUNK_AXES = ("cached", *KV_CACHE_AXES)
"""Of blocks of every layer's K and V."""
QUERY_AXES = ("tokens", "heads", "head_dim")
QKV_AXES = ("splits", "tokens", "kv_heads", "qkv", "head_dim")
REPLICATED = PartitionSpec()


def partition_spec(axes: Sequence[str]) -> PartitionSpec:
    """The spec of an array whose dimensions have these logical names."""
    return PartitionSpec(*(AXIS_RULES[axis] for axis in axes))


def named_sharding(mesh: Mesh, axes: Sequence[str]) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, REPLICATED)
