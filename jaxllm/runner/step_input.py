"""A step's host data: packed into one int32 buffer, unpacked inside the compiled step.

One buffer means one transfer. The layout is a list of named sections, fixed per bucket, and the only
place that knows an offset: packing and unpacking both read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.request import Request
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.device_state import Asks, SamplingState
from jaxllm.sampling_params import MAX_SUPPRESSED_TOKEN_IDS
from jaxllm.scheduling.plan import PlanRow, StepPlan

SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of the size of sampling parameters on the device: what is beyond is as good, and would overflow in float32."""
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

ADMITTED_BLOCKS = 4096
"""16 KiB of a step's input."""


def most_admitted_blocks(max_blocks: int, num_seats: int) -> int:
    """Blocks of admitted requests that one step can hold: at least the table of one request, the longest.

    More only make a step's input larger. The scheduler spreads admissions over steps accordingly.
    """
    return min(max(ADMITTED_BLOCKS, max_blocks), max_blocks * num_seats)


class StepInput(NamedTuple):
    """The unpacked buffer. Padding rows sit on the trash seat with no tokens and no context."""

    token_ids: Int[Array, " tokens"]
    seats: Int[Array, " rows"]
    query_start: Int[Array, " rows+1"]
    context_lens: Int[Array, " rows"]
    samples: Bool[Array, " rows"]
    """The row's sampled token is kept."""
    pending: Bool[Array, " rows"]
    """The row's last token is the one its seat sampled last, not known to the host yet."""
    num_steps: Int[Array, " rows"]
    """Steps of one token each that the row takes; padding rows take none."""
    block_start: Int[Array, " rows+1"]
    """Row r's new blocks are `new_blocks[block_start[r]:block_start[r + 1]]`."""
    first_block: Int[Array, " rows"]
    """Index in the row's block table of the first of them."""
    new_blocks: Int[Array, " changes"]
    admitted_seats: Int[Array, " admissions"]
    admitted: SamplingState
    """Rows of sampling state for the admitted seats."""

    def after(self, index: Int[Array, ""]) -> StepInput:
        """The step that follows `index` others of the same call: rows that took all of theirs have no context."""
        active = index < self.num_steps
        return self._replace(
            context_lens=jnp.where(active, self.context_lens + index, 0),
            samples=self.samples & active,
            pending=self.pending | (index > 0),
        )


@dataclass(frozen=True)
class StepLayout:
    """Where each section of a bucket's buffer lies."""

    bucket: Bucket
    admitted_blocks: int
    """Most blocks of rows that take a seat, all tables together."""
    trash_seat: int
    vocab_size: int

    @property
    def num_changes(self) -> int:
        """New blocks of a step: the tables of admitted rows, and one begun by each other row."""
        return self.bucket.rows + (self.admitted_blocks if self.bucket.admits else 0)

    @cached_property
    def sections(self) -> dict[str, tuple[int, ...]]:
        """Shape of each section, in order."""
        tokens, rows, changes = self.bucket.tokens, self.bucket.rows, self.num_changes
        admissions = rows if self.bucket.admits else 0
        return {
            "token_ids": (tokens,),
            "seats": (rows,),
            "query_start": (rows + 1,),
            "context_lens": (rows,),
            "samples": (rows,),
            "pending": (rows,),
            "num_steps": (rows,),
            "block_start": (rows + 1,),
            "first_block": (rows,),
            "new_blocks": (changes,),
            "admitted_seats": (admissions,),
            **dict.fromkeys((*FLOAT_FIELDS, "top_k", "asks"), (admissions,)),
            "key": (admissions, 2),
            "min_len": (admissions,),
            "stop_ids": (admissions, MAX_SUPPRESSED_TOKEN_IDS),
        }

    @cached_property
    def size(self) -> int:
        """Length of the buffer in int32 words."""
        return sum(math.prod(shape) for shape in self.sections.values())

    def pack(self, plan: StepPlan) -> np.ndarray:
        """Int32 [size]: the plan, padded to the bucket."""
        packed = np.zeros(self.size, np.int32)
        views = _views(self.sections, packed)
        views["seats"][:] = views["admitted_seats"][:] = self.trash_seat
        views["stop_ids"][:] = self.vocab_size
        # The trash seat asks for nothing, so that padding rows do not make a step sample.
        views["top_p"][:] = views["repetition_penalty"][:] = np.float32(1).view(np.int32)
        _pack_rows(plan, views)
        _pack_new_blocks(plan, views)
        for index, row in enumerate(row for row in plan.rows if row.admitted):
            views["admitted_seats"][index] = row.seat
            _pack_sampling(row.request, views, index, self.vocab_size)
        return packed

    def unpack(self, packed: Int[Array, " size"]) -> StepInput:
        """The sections again, inside the compiled step."""
        parts = _views(self.sections, packed)
        for name in FLOAT_FIELDS:
            parts[name] = jax.lax.bitcast_convert_type(parts[name], jnp.float32)
        parts["key"] = jax.lax.bitcast_convert_type(parts["key"], jnp.uint32)
        parts["samples"], parts["pending"] = parts["samples"] != 0, parts["pending"] != 0
        admitted = SamplingState(**{name: parts.pop(name) for name in SamplingState._fields})
        return StepInput(**parts, admitted=admitted)


def _views(sections: dict[str, tuple[int, ...]], buffer) -> dict:
    """Each section as a slice of the buffer (NumPy or JAX)."""
    views, start = {}, 0
    for name, shape in sections.items():
        stop = start + math.prod(shape)
        views[name] = buffer[start:stop].reshape(shape)
        start = stop
    return views


def _pack_rows(plan: StepPlan, views: dict[str, np.ndarray]) -> None:
    count = len(plan.rows)
    lengths = [row.num_tokens for row in plan.rows]
    views["query_start"][1 : count + 1] = np.cumsum(lengths)
    views["query_start"][count + 1 :] = plan.num_tokens
    views["seats"][:count] = [row.seat for row in plan.rows]
    views["context_lens"][:count] = [row.end for row in plan.rows]
    views["samples"][:count] = [row.samples for row in plan.rows]
    views["pending"][:count] = [row.end > row.num_known for row in plan.rows]
    views["num_steps"][:count] = [row.num_steps for row in plan.rows]
    tokens = [token for row in plan.rows for token in _row_tokens(row)]
    views["token_ids"][: len(tokens)] = tokens


def _row_tokens(row: PlanRow) -> list[int]:
    """The row's tokens; a place whose token is still on the device holds 0."""
    known = row.request.get_token_ids(row.start, min(row.end, row.num_known))
    return known + [0] * (row.num_tokens - len(known))


def _pack_new_blocks(plan: StepPlan, views: dict[str, np.ndarray]) -> None:
    count = len(plan.rows)
    views["block_start"][1 : count + 1] = np.cumsum([len(row.new_block_ids) for row in plan.rows])
    views["first_block"][:count] = [row.first_new_block for row in plan.rows]
    blocks = [block for row in plan.rows for block in row.new_block_ids]
    views["block_start"][count + 1 :] = len(blocks)
    views["new_blocks"][: len(blocks)] = blocks


def _pack_sampling(request: Request, views: dict[str, np.ndarray], index: int, vocab_size: int) -> None:
    """Users may give any number: one that is too large for the device becomes the largest that makes sense."""
    params = request.params
    for name in FLOAT_FIELDS:
        value = getattr(params, name)
        size = min(max(abs(value), SMALLEST), LARGEST) if value else 0
        views[name][index] = np.float32(-size if value < 0 else size).view(np.int32)
    views["asks"][index] = Asks.of(params)
    views["top_k"][index] = min(max(params.top_k, 0), vocab_size)
    views["key"][index] = np.array([request.seed >> 32 & 0xFFFFFFFF, request.seed & 0xFFFFFFFF], np.uint32).view(
        np.int32
    )
    if params.min_tokens:
        stops = sorted(stop for stop in request.stop_token_ids if stop < vocab_size)
        views["min_len"][index] = min(request.prompt_len + params.min_tokens, np.iinfo(np.int32).max)
        views["stop_ids"][index, : len(stops)] = stops
