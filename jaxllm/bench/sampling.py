"""The sampler by itself, in microseconds a step.

Invariant: it is called as a step calls it, with every row sampled alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from jaxllm.bench.report import Figure, round_to
from jaxllm.bench.settings import KernelSettings
from jaxllm.bench.timing import choose_backend, seconds_per_call
from jaxllm.kernels.backend import Backend
from jaxllm.runner.device_state import SamplingState, Tables
from jaxllm.runner.logit_changes import Rows
from jaxllm.runner.sampler import Sample, sample
from jaxllm.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_SUPPRESSED_TOKEN_IDS,
)

STEPS = 4
"""Steps in one compiled function, each with logits of its own."""

CASES: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}


def measure_sampler(settings: KernelSettings, seed: int) -> Iterator[Figure]:
    """One figure for each way of sampling."""
    rows, vocab = settings.sampler_rows, settings.vocab_size
    keys = jax.random.split(jax.random.key(seed), STEPS)
    logits = tuple(3 * jax.random.normal(key, (rows, vocab)) for key in keys)
    seats = _seats(rows, vocab)
    call = partial(_sample_all, backend=choose_backend(settings))
    for case, values in CASES.items():
        seconds = seconds_per_call(call, logits, _state(rows, vocab, values), seats) / STEPS
        yield Figure(f"sampler, {rows} rows of {vocab}, {case}", round_to(seconds * 1e6), "us")


@partial(jax.jit, static_argnames="backend")
def _sample_all(
    logits: tuple[jax.Array, ...], state: SamplingState, seats: tuple[jax.Array, Tables], *, backend: Backend
) -> tuple[Sample, ...]:
    history, tables = seats
    rows = Rows(state, jnp.arange(len(history)), jnp.full(len(history), 512, jnp.int32))
    return tuple(sample(one, rows, history, tables, backend=backend) for one in logits)


def _seats(rows: int, vocab: int) -> tuple[jax.Array, Tables]:
    """History and tables that nobody reads."""
    tables = Tables(
        bias_ids=jnp.full((rows, MAX_LOGIT_BIASES), vocab, jnp.int32),
        biases=jnp.zeros((rows, MAX_LOGIT_BIASES), jnp.float32),
        bad_words=jnp.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), vocab, jnp.int32),
        recent=jnp.full((rows, MAX_BAD_WORD_TOKENS - 1), vocab, jnp.int32),
    )
    return jnp.zeros((rows, vocab), jnp.uint16), tables


def _state(rows: int, vocab: int, values: Mapping[str, float]) -> SamplingState:
    return SamplingState(
        temperature=jnp.full(rows, values["temperature"], jnp.float32),
        top_p=jnp.full(rows, values.get("top_p", 1.0), jnp.float32),
        top_k=jnp.full(rows, values.get("top_k", 0), jnp.int32),
        min_p=jnp.zeros(rows, jnp.float32),
        repetition_penalty=jnp.ones(rows, jnp.float32),
        presence_penalty=jnp.zeros(rows, jnp.float32),
        frequency_penalty=jnp.zeros(rows, jnp.float32),
        asks=jnp.zeros(rows, jnp.int32),
        key=jnp.stack([jnp.arange(rows, dtype=jnp.uint32)] * 2, axis=1),
        min_len=jnp.zeros(rows, jnp.int32),
        stop_ids=jnp.full((rows, MAX_SUPPRESSED_TOKEN_IDS), vocab, jnp.int32),
    )
