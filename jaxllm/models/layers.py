"""The small layers a decoder is made of.

Parameters carry the logical names of their axes (`axes`), which `jaxllm.parallel.sharding` places on a
mesh. They are made abstract (`flax.nnx.eval_shape`) and filled by the loader, so nothing here initialises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.kernels.linear import linear
from jaxllm.kernels.ragged_paged_attention import Backend

type Axis = tuple[str, int]
"""Logical name and size of one dimension."""


@dataclass(frozen=True)
class Setting:
    """What layers are told besides the model's own facts: how and where they compute."""

    dtype: jnp.dtype
    mesh: Mesh
    attention_backend: Backend

    @property
    def platform(self) -> str:
        """ "cpu", "gpu"."""
        return self.mesh.devices.flat[0].platform


def parameter(axes: Sequence[Axis], dtype: jnp.dtype) -> nnx.Param:
    """A parameter of these named dimensions."""
    return nnx.Param(jnp.zeros([size for _, size in axes], dtype), axes=tuple(name for name, _ in axes))


class Projection(nnx.Module):
    """A linear map from the last axes of its input to new ones, with an optional bias."""

    def __init__(self, inputs: Sequence[Axis], outputs: Sequence[Axis], setting: Setting, bias: bool = False):
        self.weight = parameter([*outputs, *inputs], setting.dtype)
        self.bias = parameter(outputs, setting.dtype) if bias else None
        self.num_inputs, self.platform = len(inputs), setting.platform

    def __call__(self, x: Float[Array, "tokens *inputs"]) -> Float[Array, "tokens *outputs"]:
        y = linear(x, self.weight[...], num_inputs=self.num_inputs, platform=self.platform)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467), computed in float32.

    The scale is float32 whatever the model's type: it costs nothing, and Gemma's `1 + w` keeps all of w.
    """

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.scale = parameter([("hidden", size)], jnp.dtype("float32"))

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * inverse * self.scale[...]).astype(x.dtype)


class QKNorm(nnx.Module):
    """RMS norm of queries and keys where the merged projection puts them: each key behind its group of queries.

    One operation and one parameter for both. Over all heads (`qk_norm="all"`), the mean square of queries
    and that of keys go over the K/V heads of every device, which XLA adds up.
    """

    def __init__(self, config: ModelConfig):
        self.eps, self.over_all_heads = config.rms_norm_eps, config.qk_norm == "all"
        heads = [("kv_heads", config.num_kv_heads)] if self.over_all_heads else []
        axes = [*heads, ("qkv", config.group_size + 1), ("head_dim", config.head_dim)]
        self.scale = parameter(axes, jnp.dtype("float32"))

    def __call__(self, qk: Float[Array, "tokens kv_heads qk head_dim"]) -> Float[Array, "tokens kv_heads qk head_dim"]:
        wide = qk.astype(jnp.float32)
        squares = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        if self.over_all_heads:
            squares = self._mean_over_heads(squares)
        return (wide * jax.lax.rsqrt(squares + self.eps) * self.scale[...]).astype(qk.dtype)

    @staticmethod
    def _mean_over_heads(squares: Float[Array, "tokens kv_heads qk 1"]) -> Float[Array, "tokens 1 qk 1"]:
        squares = jnp.mean(squares, axis=1, keepdims=True)
        queries, key = squares[:, :, :-1], squares[:, :, -1:]
        mean = jnp.mean(queries, axis=2, keepdims=True)
        return jnp.concatenate([jnp.broadcast_to(mean, queries.shape), key], axis=2)


class Embedding(nnx.Module):
    """Token vectors; `logits` is the same table used as the output head."""

    def __init__(self, vocab_size: int, hidden_size: int, setting: Setting):
        self.weight = parameter([("vocab", vocab_size), ("hidden", hidden_size)], setting.dtype)
        self.platform = setting.platform

    def __call__(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        return self.weight[...][token_ids]

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Float32 scores of every token."""
        return linear(hidden, self.weight[...], num_inputs=1, platform=self.platform).astype(jnp.float32)


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

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        gate, up = jnp.unstack(self.gate_up(x), axis=-1)
        return self.down(_ACTIVATIONS[self.activation](gate) * up)
