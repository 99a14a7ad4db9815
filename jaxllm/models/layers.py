"""The small layers a decoder is made of.

Parameters carry the logical names of their axes (`axes`), which `jaxllm.parallel.sharding` places on a
mesh. They are made abstract (`flax.nnx.eval_shape`) and filled by the loader, so nothing here initialises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

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
    """Root-mean-square norm (arXiv:1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float, setting: Setting):
        self.eps = eps
        self.scale = parameter([("hidden", size)], setting.dtype)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


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


class SwiGLU(nnx.Module):
    """Gated feed-forward layer (arXiv:2002.05202) with gate and up projection in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, setting: Setting, bias: bool = False):
        hidden, intermediate = ("hidden", hidden_size), ("intermediate", intermediate_size)
        self.gate_up = Projection([hidden], [intermediate, ("gate_up", 2)], setting, bias)
        self.down = Projection([intermediate], [hidden], setting, bias)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        gate, up = jnp.unstack(self.gate_up(x), axis=-1)
        return self.down(jax.nn.silu(gate) * up)
