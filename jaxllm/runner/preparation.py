"""What the device has to do before a step that seats requests which bring more than numbers.

A fork gets a copy of a begun block, a request with penalties the history of its seat, one with biases or bad words
its tables. Each is a small executable of its own: a step that needs none pays for none.
Invariant: cache and state are updated in place, and steps launched before see nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, UInt16

from jaxllm.models.attention import LayerCache
from jaxllm.parallel.sharding import replicated
from jaxllm.request import Request
from jaxllm.runner.device_state import (
    ANY_TOKEN,
    EXCLUDED,
    IN_PROMPT,
    MOST_COUNTED,
    NO_TOKEN,
    ONCE,
    Asks,
    DeviceState,
    Tables,
)
from jaxllm.runner.executable_store import ExecutableStore
from jaxllm.runner.small_programs import get_program
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES
from jaxllm.scheduling.plan import BlockCopy, StepPlan

COPIES_PER_CALL = 16

type Cache = tuple[LayerCache, ...]


class Preparation:
    """The executables for a cache and a state of given shapes (pytrees of `jax.ShapeDtypeStruct`)."""

    def __init__(self, cache: Cache, state: DeviceState, store: ExecutableStore | None = None):
        self._cache, self._state, self._store = cache, state, store
        self._num_blocks, self._vocab_size = cache[0].keys.shape[0], state.history.shape[1]

    def compile(self) -> None:
        """Compiles all now; otherwise each is compiled when it is first needed."""
        _ = self._copy_blocks, self._set_history, self._set_tables

    def run(self, plan: StepPlan, cache: Cache, state: DeviceState) -> tuple[Cache, DeviceState]:
        """Cache and state as the plan's rows need them; the ones given are donated where anything is to be done."""
        for start in range(0, len(plan.copies), COPIES_PER_CALL):
            cache = self._copy(plan.copies[start : start + COPIES_PER_CALL], cache)
        for row in plan.rows:
            asks = Asks.of(row.request.params) if row.admitted else Asks(0)
            if asks & (Asks.PENALTIES | Asks.ONLY_ALLOWED):
                words = make_history(row.request, self._vocab_size)
                state = state._replace(history=self._set_history(state.history, np.int32(row.seat), words))
            if asks & Asks.TABLES:
                tables = make_tables(row.request, self._vocab_size)
                state = state._replace(tables=self._set_tables(state.tables, np.int32(row.seat), tables))
        return cache, state

    def _copy(self, copies: Sequence[BlockCopy], cache: Cache) -> Cache:
        blocks = np.full((2, COPIES_PER_CALL), [[0], [self._num_blocks]], np.int32)
        blocks[:, : len(copies)] = np.array(copies, np.int32).T
        return self._copy_blocks(cache, blocks)

    @cached_property
    def _copy_blocks(self) -> jax.stages.Compiled:
        return self._make(copy_blocks, self._cache, np.zeros((2, COPIES_PER_CALL), np.int32))

    @cached_property
    def _set_history(self) -> jax.stages.Compiled:
        return self._make(set_seat, self._state.history, np.int32(0), np.zeros(self._vocab_size, np.uint16))

    @cached_property
    def _set_tables(self) -> jax.stages.Compiled:
        seat = jax.tree.map(lambda spec: np.zeros(spec.shape[1:], spec.dtype), self._state.tables)
        return self._make(set_seat, self._state.tables, np.int32(0), seat)

    def _make(self, function: Callable[..., Any], donated: Any, *others: Any) -> jax.stages.Compiled:
        """From disk or compiled: one argument that is updated in place, and others like these."""
        everywhere = replicated(jax.tree.leaves(donated)[0].sharding.mesh)
        specs = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=everywhere), others)
        name = f"{function.__name__}-{type(donated).__name__}"
        return get_program(self._store, name, function, (donated, *specs), donated)


def copy_blocks(cache: Cache, blocks: Int[Array, "2 copies"]) -> Cache:
    """Copies blocks `blocks[0]` of every layer to `blocks[1]`; a destination past the last block is dropped."""
    source, destination = blocks

    def copy(pages: Array) -> Array:
        return pages.at[destination].set(pages[source], mode="drop", unique_indices=True)

    return jax.tree.map(copy, cache)


def set_seat(state: Any, seat: Int[Array, ""], values: Any) -> Any:
    """Replaces what arrays (as a pytree) hold of one seat."""
    return jax.tree.map(lambda old, new: old.at[seat].set(new), state, values)


def make_history(request: Request, vocab_size: int) -> UInt16[np.ndarray, " vocab"]:
    """A seat's history as its request begins or goes on."""
    allowed = request.params.allowed_token_ids
    words = np.full(vocab_size, 0 if allowed is None else EXCLUDED, np.uint16)
    if allowed is not None:
        words[list(allowed)] = 0
    words[list(set(request.prompt_ids))] |= IN_PROMPT
    token_ids, counts = np.unique(np.asarray(request.output_ids, np.int64), return_counts=True)
    words[token_ids] += (np.minimum(counts, MOST_COUNTED) * ONCE).astype(np.uint16)
    return words


def make_tables(request: Request, vocab_size: int) -> Tables:
    """A seat's tables as its request begins or goes on."""
    bias_ids, biases = np.full(MAX_LOGIT_BIASES, vocab_size, np.int32), np.zeros(MAX_LOGIT_BIASES, np.float32)
    given = request.params.logit_bias or {}
    bias_ids[: len(given)], biases[: len(given)] = list(given), list(given.values())
    bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), ANY_TOKEN, np.int32)
    bad_words[:, -1] = vocab_size
    for word, token_ids in zip(bad_words, request.bad_word_ids, strict=False):
        word[-len(token_ids) :] = token_ids
    recent = np.full(MAX_BAD_WORD_TOKENS - 1, NO_TOKEN, np.int32)
    latest = request.output_ids[-len(recent) :]
    recent[len(recent) - len(latest) :] = latest
    arrays: Any = (bias_ids, biases, bad_words, recent)
    return Tables(*arrays)
