"""The small layers a decoder is made of.

Parameters carry the logical names of their axes (`axes`), which `jaxllm.parallel.sharding` places on a
mesh. They are made abstract (`flax.nnx.eval_shape`) and filled by the loader, so nothing here initialises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.kernels.add_rms_norm import add_rms_norm
from jaxllm.kernels.backend import Backend
from jaxllm.kernels.invariant_linear import invariant_linear, invariant_parts
from jaxllm.kernels.linear import linear, partial_products
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.parallel.sharding import REPLICATED, named_sharding, partition_spec, replicated

type Axis = tuple[str, int]
"""Logical name and size of one dimension."""


@dataclass(frozen=True)
class Setting:
    """What layers are told besides the model's own facts: how and where they compute."""

    dtype: jnp.dtype
    mesh: Mesh
    backend: Backend
    """Who computes attention and the operations between matrix products."""
    batch_invariant: bool = False
    """Every sum has one order, whatever else is computed beside it; not with the XLA backend."""

    @property
    def platform(self) -> str:
        """ "cpu", "gpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def interpret(self) -> bool:
        """Kernels for GPUs are interpreted on a CPU."""
        return self.backend == "pallas_interpret"


def parameter(axes: Sequence[Axis], dtype: jnp.dtype) -> nnx.Param:
    """A parameter of these named dimensions."""
    return nnx.Param(jnp.zeros([size for _, size in axes], dtype), axes=tuple(name for name, _ in axes))


class Split(NamedTuple):
    """Which axes of a projection the devices share."""

    inputs: PartitionSpec
    outputs: PartitionSpec

    @classmethod
    def of(cls, inputs: Sequence[Axis], outputs: Sequence[Axis]) -> Split:
        return cls(*(partition_spec([name for name, _ in axes]) for axes in (inputs, outputs)))


def multiply(
    x: Float[Array, "tokens *inputs"], weight: Float[Array, "*outputs_inputs"], split: Split, setting: Setting
) -> Float[Array, "tokens *outputs"]:
    """A projection's product, with an order of its sums that is the fastest, or one that never changes.

    Args:
        weight: output axes, then input axes.
        split: which of them the devices share.
    """
    num_inputs = len(split.inputs)
    if not setting.batch_invariant:
        return linear(x, weight, num_inputs=num_inputs, platform=setting.platform)

    def local(x, weight):
        y = invariant_linear(x, weight, num_inputs=num_inputs, interpret=setting.interpret)
        return _add_devices(y, setting.mesh.size) if any(split.inputs) else y

    in_specs = PartitionSpec(None, *split.inputs), PartitionSpec(*split.outputs, *split.inputs)
    out_specs = PartitionSpec(None, *split.outputs)
    return jax.shard_map(local, mesh=setting.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(x, weight)


def _add_devices(y: Float[Array, "*shape"], num_devices: int) -> Float[Array, "*shape"]:
    """The sum of what each device has, in the order of the devices: one that a library chooses depends on the size."""
    if num_devices <= 2:  # a sum of two has one order
        return jax.lax.psum(y, TENSOR_AXIS)
    parts = jnp.unstack(jax.lax.all_gather(y, TENSOR_AXIS))
    return reduce(operator.add, (part.astype(jnp.float32) for part in parts)).astype(y.dtype)


class Projection(nnx.Module):
    """A linear map from the last axes of its input to new ones, with an optional bias."""

    def __init__(self, inputs: Sequence[Axis], outputs: Sequence[Axis], setting: Setting, bias: bool = False):
        self.weight = parameter([*outputs, *inputs], setting.dtype)
        self.bias = parameter(outputs, setting.dtype) if bias else None
        self.split, self.setting = Split.of(inputs, outputs), setting

    def __call__(self, x: Float[Array, "tokens *inputs"]) -> Float[Array, "tokens *outputs"]:
        y = multiply(x, self.weight[...], self.split, self.setting)
        return y if self.bias is None else y + self.bias[...]

    def parts(self, x: Float[Array, "tokens *inputs"]) -> Float[Array, "splits tokens *outputs"]:
        """Parts that add up to `__call__`: several in float32 where the reader's kernel adds them, else one."""
        if self.bias is not None or self.setting.backend == "xla" or self._devices_add_up:
            return self(x)[None]
        in_parts = partial_products
        if self.setting.batch_invariant:
            in_parts = partial(invariant_parts, interpret=self.setting.interpret)
        local = jax.shard_map(
            partial(in_parts, num_inputs=len(self.split.inputs)),
            mesh=self.setting.mesh,
            in_specs=(REPLICATED, PartitionSpec(*self.split.outputs, *self.split.inputs)),
            out_specs=PartitionSpec(None, None, *self.split.outputs),
            check_vma=False,
        )
        return local(x, self.weight[...])

    @property
    def _devices_add_up(self) -> bool:
        """Each device has a part of the inputs: the sum of what they compute crosses between them once, in x's dtype."""
        return self.setting.mesh.size > 1 and any(self.split.inputs)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467), computed in float32.

    The scale is float32 whatever the model's type: it costs nothing, and Gemma's `1 + w` keeps all of w.
    """

    def __init__(self, config: ModelConfig, setting: Setting):
        self.eps, self.setting = config.rms_norm_eps, setting
        self.scale = parameter([("hidden", config.hidden_size)], jnp.dtype("float32"))

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        return self.after_adding(x, None)[1]

    def after_adding(
        self, x: Float[Array, "tokens hidden"], added: Float[Array, "splits tokens hidden"] | None
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        """The sum, and its norm."""
        run = partial(add_rms_norm, eps=self.eps, backend=self.setting.backend)
        whole = jax.shard_map(run, mesh=self.setting.mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
        return whole(x, added, self.scale[...])


class QKNorm(nnx.Module):
    """RMS norm of queries and keys where the merged projection puts them: each key behind its group of queries.

    One parameter for both. That of single heads is part of `rotate_and_write`.
    """

    def __init__(self, config: ModelConfig, setting: Setting):
        self.eps, self.over_all_heads, self.setting = config.rms_norm_eps, config.qk_norm == "all", setting
        heads = [("kv_heads", config.num_kv_heads)] if self.over_all_heads else []
        axes = [*heads, ("qkv", config.group_size + 1), ("head_dim", config.head_dim)]
        self.scale = parameter(axes, jnp.dtype("float32"))

    def over_heads(
        self, qkv: Float[Array, "tokens kv_heads qkv head_dim"]
    ) -> Float[Array, "tokens kv_heads qkv head_dim"]:
        """The norm over all heads (`qk_norm="all"`), the K/V heads of every device, which XLA adds up.

        XLA's order depends on how many tokens there are.
        """
        if self.setting.batch_invariant:
            mesh, everywhere = self.setting.mesh, REPLICATED
            whole = jax.shard_map(
                self._in_one_order, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
            )
            return whole(qkv, self.scale[...])
        wide = qkv[:, :, :-1].astype(jnp.float32)
        squares = self._mean_over_heads(jnp.mean(jnp.square(wide), axis=-1, keepdims=True))
        normed = wide * jax.lax.rsqrt(squares + self.eps) * self.scale[...]
        return jnp.concatenate([normed.astype(qkv.dtype), qkv[:, :, -1:]], axis=2)

    def _in_one_order(
        self, qkv: Float[Array, "tokens kv_heads qkv head_dim"], scale: Float[Array, "kv_heads qk head_dim"]
    ) -> Float[Array, "tokens kv_heads qkv head_dim"]:
        """All queries of a token as one vector, and all keys, each normed by one program."""
        group = scale.shape[1] - 1
        *normed, values = jnp.split(qkv, [group, group + 1], axis=2)
        for index, by in enumerate(jnp.split(scale, [group], axis=1)):
            x = normed[index]
            flat, backend = x.reshape(len(x), -1), self.setting.backend
            normed[index] = add_rms_norm(flat, None, by.reshape(-1), eps=self.eps, backend=backend)[1].reshape(x.shape)
        return jnp.concatenate([*normed, values], axis=2)

    @staticmethod
    def _mean_over_heads(squares: Float[Array, "tokens kv_heads qk 1"]) -> Float[Array, "tokens 1 qk 1"]:
        squares = jnp.mean(squares, axis=1, keepdims=True)
        queries, key = squares[:, :, :-1], squares[:, :, -1:]
        mean = jnp.mean(queries, axis=2, keepdims=True)
        return jnp.concatenate([jnp.broadcast_to(mean, queries.shape), key], axis=2)


class Embedding(nnx.Module):
    """Token vectors; `logits` is the same table used as the output head.

    The table is padded to as many rows as its devices can share.
    """

    def __init__(self, vocab_size: int, hidden_size: int, setting: Setting):
        rows = -(-vocab_size // setting.mesh.size) * setting.mesh.size
        outputs, inputs = ("vocab", rows), ("hidden", hidden_size)
        self.weight = parameter([outputs, inputs], setting.dtype)
        self.vocab_size, self.split, self.setting = vocab_size, Split.of([inputs], [outputs]), setting

    def __call__(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        return self.weight[...][token_ids]

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Float32 scores of every token, all of them on every device."""
        logits = multiply(hidden, self.weight[...], self.split, self.setting)
        # Said outright, or XLA brings all of the table to every device instead.
        mesh = self.setting.mesh
        logits = jax.lax.with_sharding_constraint(logits, named_sharding(mesh, ("tokens", "vocab")))
        logits = jax.lax.with_sharding_constraint(logits, replicated(mesh))
        return logits[:, : self.vocab_size].astype(jnp.float32)


_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """Gated feed-forward layer (arXiv:2002.05202) with gate and up projection in one product."""

    def __init__(self, config: ModelConfig, setting: Setting):
        hidden, intermediate = ("hidden", config.hidden_size), ("intermediate", config.intermediate_size)
        self.gate_up = Projection([hidden], [intermediate, ("gate_up", 2)], setting, config.mlp_bias)
        self.down = Projection([intermediate], [hidden], setting, config.mlp_bias)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "splits tokens hidden"]:
        """Parts of the result."""
        gate, up = jnp.unstack(self.gate_up(x), axis=-1)
        return self.down.parts(_ACTIVATIONS[self.activation](gate) * up)
