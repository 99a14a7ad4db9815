"""What the device remembers between steps, by seat: tables, last tokens, how each seat is sampled.

A seat is a running request's persistent place. The last seat is the trash seat: padding rows and padded
admissions point at it. A step sends only what changed; admission rewrites a seat's whole `SamplingState`, and
what a request asks for of its `History` and `Tables` (the rest of those is stale, and nobody reads it).
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt16, UInt32

from jaxllm.parallel.sharding import replicated
from jaxllm.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_SUPPRESSED_TOKEN_IDS,
    SamplingParams,
    is_wide,
)

type History = UInt16[Array, "seats vocab"]
"""Of each token: `IN_PROMPT`, `EXCLUDED`, and how often it came in the answer, in units of `ONCE`."""
IN_PROMPT, EXCLUDED, ONCE = 1, 2, 4
MOST_COUNTED = (1 << 14) - 1
"""A token that comes more often is counted no further."""


class Asks(enum.IntFlag):
    """What a request wants of a step besides a choice by temperature, top_k, top_p and min_p."""

    PENALTIES = enum.auto()
    """Reads counts of the history."""
    ONLY_ALLOWED = enum.auto()
    """Reads which tokens the history excludes."""
    TABLES = enum.auto()
    """Reads the tables."""
    LOGPROBS = enum.auto()
    """`Details` of its tokens."""

    @classmethod
    def of(cls, params: SamplingParams) -> Asks:
        asks = cls(0)
        if params.penalizes:
            asks |= cls.PENALTIES
        if params.allowed_token_ids is not None:
            asks |= cls.ONLY_ALLOWED
        if params.logit_bias or params.bad_words:
            asks |= cls.TABLES
        if params.logprobs is not None and not is_wide(params.logprobs):
            asks |= cls.LOGPROBS
        return asks


class SamplingState(NamedTuple):
    """How the next token of each seat (or of each row, once gathered) is chosen."""

    temperature: Float[Array, " seats"]
    top_p: Float[Array, " seats"]
    top_k: Int[Array, " seats"]
    """0 is every token."""
    min_p: Float[Array, " seats"]
    repetition_penalty: Float[Array, " seats"]
    presence_penalty: Float[Array, " seats"]
    frequency_penalty: Float[Array, " seats"]
    asks: Int[Array, " seats"]
    """`Asks`."""
    key: UInt32[Array, "seats 2"]
    """threefry key; folded with the position of the token it draws."""
    min_len: Int[Array, " seats"]
    """Length in tokens below which no stop token may be sampled."""
    stop_ids: Int[Array, "seats max_suppressed"]
    """Those stop tokens; unused places hold the vocabulary's size."""


ANY_TOKEN, NO_TOKEN = -1, -2


class Tables(NamedTuple):
    """Biases and bad words of each seat (or of each row, once gathered)."""

    bias_ids: Int[Array, "seats max_biases"]
    """Unused places hold the vocabulary's size, as in the last column of `bad_words`."""
    biases: Float[Array, "seats max_biases"]
    bad_words: Int[Array, "seats max_words max_tokens"]
    """Aligned to the right: a shorter word begins with `ANY_TOKEN`."""
    recent: Int[Array, "seats max_tokens-1"]
    """The last tokens of the answer, the newest one last; `NO_TOKEN` before its first."""


class DeviceState(NamedTuple):
    """All per-seat state; donated to every step."""

    last_token: Int[Array, " seats"]
    block_table: Int[Array, "seats max_blocks"]
    sampling: SamplingState
    history: History
    tables: Tables


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
        min_p=spec(jnp.float32),
        repetition_penalty=spec(jnp.float32),
        presence_penalty=spec(jnp.float32),
        frequency_penalty=spec(jnp.float32),
        asks=spec(jnp.int32),
        key=spec(jnp.uint32, 2),
        min_len=spec(jnp.int32),
        stop_ids=spec(jnp.int32, MAX_SUPPRESSED_TOKEN_IDS),
    )
    tables = Tables(
        bias_ids=spec(jnp.int32, MAX_LOGIT_BIASES),
        biases=spec(jnp.float32, MAX_LOGIT_BIASES),
        bad_words=spec(jnp.int32, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
        recent=spec(jnp.int32, MAX_BAD_WORD_TOKENS - 1),
    )
    return DeviceState(
        spec(jnp.int32), spec(jnp.int32, max_blocks), sampling, spec(jnp.uint16, vocab_size), tables
    )  # fmt: skip
