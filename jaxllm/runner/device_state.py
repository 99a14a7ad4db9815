"""What the device remembers between steps, by seat: tables, last tokens, how each seat is sampled.

A seat is a running request's persistent place. The last seat is the trash seat: padding rows and padded
admissions point at it. A step sends only what changed; admission rewrites a seat's whole state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.parallel.sharding import replicated
from jaxllm.sampling_params import MAX_SUPPRESSED_TOKEN_IDS


class SamplingState(NamedTuple):
    """How the next token of each seat (or of each row, once gathered) is chosen."""

    temperature: Float[Array, " seats"]
    top_p: Float[Array, " seats"]
    top_k: Int[Array, " seats"]
    """0 is every token."""
    repetition_penalty: Float[Array, " seats"]
    key: UInt32[Array, "seats 2"]
    """threefry key; folded with the position of the token it draws."""
    min_len: Int[Array, " seats"]
    """Length in tokens below which no stop token may be sampled."""
    stop_ids: Int[Array, "seats max_suppressed"]
    """Those stop tokens; unused places hold the vocabulary's size."""


class DeviceState(NamedTuple):
    """All per-seat state; donated to every step."""

    last_token: Int[Array, " seats"]
    block_table: Int[Array, "seats max_blocks"]
    sampling: SamplingState
    seen: Bool[Array, "seats vocab"]
    """Tokens of the prompt and the answer, for the repetition penalty."""


def state_specs(num_seats: int, max_blocks: int, vocab_size: int, mesh: Mesh) -> DeviceState:
    """Shapes of the state for `num_seats` seats (one more is added: the trash seat)."""
    seats = num_seats + 1
    sharding = replicated(mesh)

    def spec(dtype, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((seats, *shape), dtype, sharding=sharding)

    sampling = SamplingState(
        temperature=spec(jnp.float32),
        top_p=spec(jnp.float32),
        top_k=spec(jnp.int32),
        repetition_penalty=spec(jnp.float32),
        key=spec(jnp.uint32, 2),
        min_len=spec(jnp.int32),
        stop_ids=spec(jnp.int32, MAX_SUPPRESSED_TOKEN_IDS),
    )
    return DeviceState(spec(jnp.int32), spec(jnp.int32, max_blocks), sampling, spec(jnp.bool_, vocab_size))
