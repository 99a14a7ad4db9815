"""What the device has to do before a step that seats requests with K/V they did not compute themselves.

A fork gets a copy of a begun block, and a request with a repetition penalty gets to know the tokens that are
not computed for it. Both are small executables of their own: a step that needs neither pays for neither.
Invariant: cache and state are updated in place, and steps launched before see nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.models.attention import LayerCache
from jaxllm.parallel.sharding import replicated
from jaxllm.runner.device_state import DeviceState
from jaxllm.runner.executable_store import ExecutableStore
from jaxllm.scheduling.plan import BlockCopy, PlanRow, StepPlan

COPIES_PER_CALL = 16
TOKENS_PER_CALL = 1024

type Cache = tuple[LayerCache, ...]


class Preparation:
    """The two executables for a cache and a state of given shapes (pytrees of `jax.ShapeDtypeStruct`)."""

    def __init__(self, cache: Cache, state: DeviceState, store: ExecutableStore | None = None):
        self._cache, self._seen, self._store = cache, state.seen, store
        self._num_blocks, self._vocab_size = cache[0].keys.shape[0], state.seen.shape[1]

    def compile(self) -> None:
        """Compiles both now; otherwise each is compiled when it is first needed."""
        _ = self._copy_blocks, self._set_seen

    def run(self, plan: StepPlan, cache: Cache, state: DeviceState) -> tuple[Cache, DeviceState]:
        """Cache and state as the plan's rows need them; the ones given are donated where anything is to be done."""
        for start in range(0, len(plan.copies), COPIES_PER_CALL):
            cache = self._copy(plan.copies[start : start + COPIES_PER_CALL], cache)
        for row in plan.rows:
            if row.admitted and row.start > 0 and row.request.params.repetition_penalty != 1:
                state = state._replace(seen=self._restore(row, state.seen))
        return cache, state

    def _copy(self, copies: Sequence[BlockCopy], cache: Cache) -> Cache:
        blocks = np.full((2, COPIES_PER_CALL), [[0], [self._num_blocks]], np.int32)
        blocks[:, : len(copies)] = np.array(copies, np.int32).T
        return self._copy_blocks(cache, blocks)

    def _restore(self, row: PlanRow, seen: Array) -> Array:
        token_ids = sorted(set(row.request.get_token_ids(0, row.start)))
        for start in range(0, len(token_ids), TOKENS_PER_CALL):
            part = np.full(TOKENS_PER_CALL, self._vocab_size, np.int32)
            chunk = token_ids[start : start + TOKENS_PER_CALL]
            part[: len(chunk)] = chunk
            seen = self._set_seen(seen, np.array([row.seat, start > 0], np.int32), part)
        return seen

    @cached_property
    def _copy_blocks(self) -> jax.stages.Compiled:
        return self._make(copy_blocks, self._cache, (2, COPIES_PER_CALL))

    @cached_property
    def _set_seen(self) -> jax.stages.Compiled:
        return self._make(set_seen, self._seen, (2,), (TOKENS_PER_CALL,))

    def _make(self, function: Callable[..., Any], donated: Any, *shapes: tuple[int, ...]) -> jax.stages.Compiled:
        """From disk or compiled: one argument that is updated in place, and int32 arrays of these shapes."""
        sharding = jax.tree.map(lambda spec: spec.sharding, donated)
        everywhere = replicated(jax.tree.leaves(sharding)[0].mesh)
        arguments = (donated, *(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere) for shape in shapes))
        stored = self._store.load(function.__name__, arguments, donated) if self._store else None
        if stored is not None:
            return stored
        compiled = jax.jit(function, donate_argnums=0, out_shardings=sharding).lower(*arguments).compile()
        if self._store:
            self._store.save(function.__name__, compiled)
        return compiled


def copy_blocks(cache: Cache, blocks: Int[Array, "2 copies"]) -> Cache:
    """Copies blocks `blocks[0]` of every layer to `blocks[1]`; a destination past the last block is dropped."""
    source, destination = blocks

    def copy(pages: Array) -> Array:
        return pages.at[destination].set(pages[source], mode="drop", unique_indices=True)

    return jax.tree.map(copy, cache)


def set_seen(
    seen: Bool[Array, "seats vocab"], seat_and_keep: Int[Array, "2"], token_ids: Int[Array, " tokens"]
) -> Bool[Array, "seats vocab"]:
    """Marks tokens of a seat as seen, and all others as not seen unless they are to be kept."""
    seat, keep = seat_and_keep
    row = (seen[seat] & (keep != 0)).at[token_ids].set(True, mode="drop")
    return seen.at[seat].set(row)
