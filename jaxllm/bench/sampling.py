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
from jaxllm.runner.device_state import SamplingState
from jaxllm.runner.sampler import Sample, sample
from jaxllm.sampling_params import MAX_SUPPRESSED_TOKEN_IDS

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
    seen = jnp.zeros((rows, vocab), jnp.bool_)
    call = partial(_sample_all, backend=choose_backend(settings))
    for case, values in CASES.items():
        seconds = seconds_per_call(call, logits, _state(rows, vocab, values), seen) / STEPS
        yield Figure(f"sampler, {rows} rows of {vocab}, {case}", round_to(seconds * 1e6), "us")


@partial(jax.jit, static_argnames="backend")
def _sample_all(
    logits: tuple[jax.Array, ...], state: SamplingState, seen: jax.Array, *, backend: Backend
) -> tuple[Sample, ...]:
    seats = jnp.arange(seen.shape[0])
    lengths = jnp.full(seen.shape[0], 512, jnp.int32)
    return tuple(sample(one, state, seen, seats, lengths, backend=backend) for one in logits)


def _state(rows: int, vocab: int, values: Mapping[str, float]) -> SamplingState:
    return SamplingState(
        temperature=jnp.full(rows, values["temperature"], jnp.float32),
        top_p=jnp.full(rows, values.get("top_p", 1.0), jnp.float32),
        top_k=jnp.full(rows, values.get("top_k", 0), jnp.int32),
        repetition_penalty=jnp.ones(rows, jnp.float32),
        key=jnp.stack([jnp.arange(rows, dtype=jnp.uint32)] * 2, axis=1),
        min_len=jnp.zeros(rows, jnp.int32),
        stop_ids=jnp.full((rows, MAX_SUPPRESSED_TOKEN_IDS), vocab, jnp.int32),
    )
