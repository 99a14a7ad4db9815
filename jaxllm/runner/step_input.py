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
from jaxllm.runner.device_state import SamplingState
from jaxllm.sampling_params import MAX_SUPPRESSED_TOKEN_IDS
from jaxllm.scheduling.plan import PlanRow, StepPlan

SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of positive sampling parameters on the device: what is beyond is as good, and would overflow in float32."""


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
    table_seat: Int[Array, " changes"]
    table_index: Int[Array, " changes"]
    table_block: Int[Array, " changes"]
    admitted_seats: Int[Array, " admissions"]
    admitted: SamplingState
    """Rows of sampling state for the admitted seats."""


@dataclass(frozen=True)
class StepLayout:
    """Where each section of a bucket's buffer lies."""

    bucket: Bucket
    block_size: int
    trash_seat: int
    vocab_size: int

    @property
    def num_changes(self) -> int:
        """New blocks of a step: whole ones its tokens fill, and one begun by each row."""
        return self.bucket.tokens // self.block_size + self.bucket.rows

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
            "table_seat": (changes,),
            "table_index": (changes,),
            "table_block": (changes,),
            "admitted_seats": (admissions,),
            "temperature": (admissions,),
            "top_p": (admissions,),
            "top_k": (admissions,),
            "repetition_penalty": (admissions,),
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
        views["seats"][:] = views["table_seat"][:] = views["admitted_seats"][:] = self.trash_seat
        views["stop_ids"][:] = self.vocab_size
        # The trash seat asks for nothing, so that padding rows do not make a step sample.
        views["top_p"][:] = views["repetition_penalty"][:] = np.float32(1).view(np.int32)
        _pack_rows(plan, views)
        _pack_table_changes(plan, views)
        admitted = [row.request for row in plan.rows if row.admitted]
        views["admitted_seats"][: len(admitted)] = [row.seat for row in plan.rows if row.admitted]
        for index, request in enumerate(admitted):
            _pack_sampling(request, views, index, self.vocab_size)
        return packed

    def unpack(self, packed: Int[Array, " size"]) -> StepInput:
        """The sections again, inside the compiled step."""
        parts = _views(self.sections, packed)
        for name in ("temperature", "top_p", "repetition_penalty"):
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
    tokens = [token for row in plan.rows for token in _row_tokens(row)]
    views["token_ids"][: len(tokens)] = tokens


def _row_tokens(row: PlanRow) -> list[int]:
    """The row's tokens; a place whose token is still on the device holds 0."""
    known = row.request.get_token_ids(row.start, min(row.end, row.num_known))
    return known + [0] * (row.num_tokens - len(known))


def _pack_table_changes(plan: StepPlan, views: dict[str, np.ndarray]) -> None:
    changes = [
        (row.seat, row.first_new_block + offset, block)
        for row in plan.rows
        for offset, block in enumerate(row.new_block_ids)
    ]
    if changes:
        columns = np.array(changes, np.int32).T
        for name, column in zip(("table_seat", "table_index", "table_block"), columns, strict=True):
            views[name][: len(changes)] = column


def _pack_sampling(request: Request, views: dict[str, np.ndarray], index: int, vocab_size: int) -> None:
    """Users may give any number: one that is too large for the device becomes the largest that makes sense."""
    params = request.params
    for name in ("temperature", "top_p", "repetition_penalty"):
        value = getattr(params, name)
        views[name][index] = np.float32(min(max(value, SMALLEST), LARGEST) if value else 0).view(np.int32)
    views["top_k"][index] = min(max(params.top_k, 0), vocab_size)
    views["key"][index] = np.array([request.seed >> 32 & 0xFFFFFFFF, request.seed & 0xFFFFFFFF], np.uint32).view(
        np.int32
    )
    if params.min_tokens:
        stops = sorted(stop for stop in request.stop_token_ids if stop < vocab_size)
        views["min_len"][index] = min(request.prompt_len + params.min_tokens, np.iinfo(np.int32).max)
        views["stop_ids"][index, : len(stops)] = stops
