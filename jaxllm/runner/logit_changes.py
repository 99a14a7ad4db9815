"""What requests ask to be done to their logits before a token is chosen, and what is remembered for it.

The order is vLLM's: tokens that are not allowed, bad words, stop tokens that come too early, biases, the engine's
own processors, penalties. Invariant: a row's logits depend on its own seat alone, and those of a row that asks for
nothing do not change, but by the engine's processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16

from jaxllm.runner.device_state import (
    ANY_TOKEN,
    EXCLUDED,
    IN_PROMPT,
    MOST_COUNTED,
    ONCE,
    Asks,
    DeviceState,
    History,
    SamplingState,
    Tables,
)

MASKED = float("-inf")

type LogitsProcessor = Callable[[Float[Array, "rows vocab"]], Float[Array, "rows vocab"]]
"""A pure function of JAX; every row by itself."""


class Rows(NamedTuple):
    """What is known of the rows of a step."""

    sampling: SamplingState
    seats: Int[Array, " rows"]
    lengths: Int[Array, " rows"]
    """Tokens of each row so far."""

    def ask(self, what: Asks) -> Array:
        """Bool [rows]: which of them ask for it."""
        return (self.sampling.asks & what.value) != 0


def change_logits(
    logits: Float[Array, "rows vocab"],
    rows: Rows,
    history: History,
    tables: Tables,
    processors: Sequence[LogitsProcessor] = (),
) -> Float[Array, "rows vocab"]:
    """Float32 logits as the tokens are chosen by.

    Args:
        logits: raw, in any type.
        rows: whose they are.
        history: by seat.
        tables: by seat.
        processors: the engine's own, applied to every row.
    """
    known = history[rows.seats]
    is_excluded = rows.ask(Asks.ONLY_ALLOWED)[:, None] & ((known & EXCLUDED) != 0)
    changed = jnp.where(is_excluded, MASKED, logits.astype(jnp.float32))
    token_ids, amounts = _additions(rows, Tables(*(field[rows.seats] for field in tables)), logits.shape[1])
    changed = changed.at[jnp.arange(len(logits))[:, None], token_ids].add(amounts, mode="drop")
    for processor in processors:
        changed = processor(changed)
    return penalize(changed, rows.sampling, jnp.where(rows.ask(Asks.PENALTIES)[:, None], known, 0))


def penalize(
    logits: Float[Array, "rows vocab"], sampling: SamplingState, known: UInt16[Array, "rows vocab"]
) -> Float[Array, "rows vocab"]:
    """Logits less the penalties on what came before.

    The repetition penalty divides positive logits of tokens of prompt and answer, and multiplies negative ones
    (arXiv:1909.05858); the others are subtracted, for tokens of the answer.
    """
    count = (known // ONCE).astype(jnp.float32)
    came = (count > 0) | ((known & IN_PROMPT) != 0)
    factor = jnp.where(came, sampling.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    amount = sampling.frequency_penalty[:, None] * count
    return logits - amount - jnp.where(count > 0, sampling.presence_penalty[:, None], 0.0)


def _additions(rows: Rows, tables: Tables, vocab: int) -> tuple[Int[Array, "rows n"], Float[Array, "rows n"]]:
    """What to add to which logits: biases, and -inf for bad words and early stop tokens; no place is that of none."""
    asks = rows.ask(Asks.TABLES)[:, None]
    begun = tables.bad_words[:, :, :-1]
    fits = jnp.all((begun == ANY_TOKEN) | (begun == tables.recent[:, None, :]), axis=-1)
    early = rows.lengths < rows.sampling.min_len
    columns = (
        (asks, tables.bias_ids, tables.biases),
        (asks & fits, tables.bad_words[:, :, -1], MASKED),
        (early[:, None], rows.sampling.stop_ids, MASKED),
    )
    token_ids = [jnp.where(applies, ids, vocab) for applies, ids, _ in columns]
    amounts = [jnp.broadcast_to(jnp.asarray(amount, jnp.float32), ids.shape) for _, ids, amount in columns]
    return jnp.concatenate(token_ids, axis=1), jnp.concatenate(amounts, axis=1)


def note_tokens(state: DeviceState, seats: Int[Array, " rows"], token_ids: Int[Array, " rows"]) -> DeviceState:
    """Counts a sampled token of each seat; a seat past the last one is dropped, and no other is there twice."""
    history, recent = state.history, state.tables.recent
    counted = jnp.minimum(history[seats, token_ids] // ONCE, MOST_COUNTED - 1) * ONCE + ONCE
    noted = counted | (history[seats, token_ids] % ONCE)
    history = history.at[seats, token_ids].set(noted.astype(history.dtype), mode="drop", unique_indices=True)
    shifted = jnp.concatenate([recent[seats, 1:], token_ids[:, None]], axis=1)
    recent = recent.at[seats].set(shifted, mode="drop", unique_indices=True)
    return state._replace(history=history, tables=state.tables._replace(recent=recent))
