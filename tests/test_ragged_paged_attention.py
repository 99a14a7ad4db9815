"""Paged attention against an oracle that gathers the whole table in float64.

Whatever no query may see is NaN: unused slots, blocks of nobody, the null block. Table entries past a
context name any block there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import ragged_paged_attention_xla as xla
from jaxllm.kernels.ragged_paged_attention import Sizes, prepare_attention, ragged_paged_attention

FLOAT32_ERROR = 2e-6
BFLOAT16_ERROR = 2.0**-8
"""One rounding of the result: a bfloat16 has 8 significant bits, and the largest result may be a little above 2^n."""

DECODE = ((1, 5), (1, 300), (1, 64), (1, 1), (1, 170))
MIXED = ((33, 33), (20, 170), (1, 300), (7, 65), (1, 1))
"""Rows as (queries, context): a first chunk, later chunks, and rows that decode beside them."""


@dataclass(frozen=True)
class Batch:
    """The arrays of one call."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray

    @property
    def arrays(self):
        return tuple(vars(self).values())

    @property
    def num_tokens(self):
        """Tokens that are no padding."""
        return self.cu_q_lens[-1]

    def cast(self, dtype):
        arrays = {name: getattr(self, name).astype(dtype) for name in ("q", "k_cache", "v_cache")}
        return replace(self, **arrays)


def make_batch(rows, num_tokens, num_rows, heads=(6, 3), head_dim=64, block_size=16, max_len=304, seed=0):
    """Random queries and contexts for `rows`, padded to `num_tokens` and `num_rows`.

    Tables end within a tile of the context.
    """
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    max_blocks = -(-max_len // block_size)
    num_blocks = 1 + num_rows * max_blocks  # not only those in use, so that one shape serves all batches of a bucket
    tables = rng.integers(0, num_blocks, (num_rows, max_blocks)).astype(np.int32)
    caches = np.full((2, num_blocks, block_size, num_kv_heads, head_dim), np.nan, np.float32)
    free = list(rng.permutation(np.arange(1, num_blocks)))
    for row, (_, length) in enumerate(rows):
        for start in range(0, length, block_size):
            block, count = free.pop(), min(block_size, length - start)
            tables[row, start // block_size] = block
            caches[:, block, :count] = rng.standard_normal((2, count, num_kv_heads, head_dim))
    kv_lens, cu_q_lens = np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)
    kv_lens[: len(rows)] = [length for _, length in rows]
    ends = np.cumsum([count for count, _ in rows])
    cu_q_lens[1 : len(rows) + 1], cu_q_lens[len(rows) + 1 :] = ends, ends[-1]
    q = rng.standard_normal((num_tokens, num_heads, head_dim)).astype(np.float32)
    return Batch(q, caches[0], caches[1], tables, kv_lens, cu_q_lens)


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "k_scale", "v_scale"))
def attention(*arrays, **options):
    return ragged_paged_attention(*arrays, **options)


def oracle(batch, *, scale, window=None, soft_cap=None, sinks=None, k_scale=1.0, v_scale=1.0):
    """Float64 [tokens, heads, head_dim], row by row over the gathered table."""
    q, k_cache, v_cache = (array.astype(np.float64) for array in batch.arrays[:3])
    out = np.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    for row, (start, stop) in enumerate(zip(batch.cu_q_lens[:-1], batch.cu_q_lens[1:], strict=True)):
        length, table = batch.kv_lens[row], batch.block_tables[row]
        keys, values = (
            cache[table].reshape(-1, *cache.shape[2:])[:length].repeat(group, axis=1) * factor
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        scores = np.einsum("qhd,khd->hqk", q[start:stop], keys) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        distance = np.arange(length - (stop - start), length)[:, None] - np.arange(length)
        scores = np.where((distance >= 0) & (distance < (window or np.inf)), scores, -np.inf)
        if sinks is not None:
            column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, column], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e300))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[start:stop] = np.einsum("hqk,khd->qhd", weights[..., :length], values)
    return out


def relative_error(batch, out, expected):
    out, expected = (np.asarray(array, np.float64)[: batch.num_tokens] for array in (out, expected))
    return np.abs(out - expected).max() / np.abs(expected).max()


def check(batch, limit=FLOAT32_ERROR, **options):
    options = {"scale": batch.q.shape[-1] ** -0.5} | options
    out = attention(*batch.arrays, **options)
    assert out.shape == batch.q.shape and out.dtype == batch.q.dtype
    assert np.isfinite(np.asarray(out, np.float32)).all(), "padding leaks"
    assert relative_error(batch, out, oracle(batch, **options)) < limit


SHAPES = [((6, 3), 64, 16), ((9, 3), 96, 64), ((8, 2), 128, 128), ((2, 2), 80, 32), ((7, 1), 64, 32)]
"""Query and K/V heads (groups of 1, 2, 3, 4 and 7), head_dim, block_size."""


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES[:3], ids=str)
def test_single_tokens(heads, head_dim, block_size):
    check(make_batch(DECODE, 8, 8, heads, head_dim, block_size))


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES, ids=str)
def test_chunks_and_single_tokens(heads, head_dim, block_size):
    check(make_batch(MIXED, 80, 8, heads, head_dim, block_size))


SINKS = np.linspace(-3, 3, 6, dtype=np.float32)
ALL_OPTIONS = {"window": 70, "soft_cap": 5.0, "sinks": SINKS, "k_scale": 2.0, "v_scale": 0.5}


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 20},
        {"window": 1000},
        {"soft_cap": 2.0, "sinks": SINKS},
        {"k_scale": 0.25, "v_scale": 3.0, "scale": 0.3},
        ALL_OPTIONS,
    ],
    ids=["window of one", "window", "window over all", "soft_cap and sinks", "scales", "all"],
)
def test_options(options):
    check(make_batch(MIXED, 80, 8), **options)


def test_options_of_single_tokens():
    check(make_batch(DECODE, 8, 8), **ALL_OPTIONS)


def test_bfloat16():
    check(make_batch(MIXED, 80, 8).cast(jnp.bfloat16), limit=BFLOAT16_ERROR)


BORDERS = (15, 16, 17, 63, 64, 65)


def test_contexts_that_end_around_the_borders_of_tiles():
    check(make_batch([(1, length) for length in BORDERS], 8, 8))


def test_chunks_that_begin_and_end_around_the_borders_of_tiles():
    """One executable; every pair of a chunk's length and of what came before it is met."""
    pairs = [(count, before + count) for count in (1, *BORDERS) for before in (0, 1, *BORDERS)]
    pairs = np.random.default_rng(0).permutation(pairs)
    for index in range(0, len(pairs), 4):
        check(make_batch(pairs[index : index + 4].tolist(), 272, 6, head_dim=16, seed=index))


def test_a_step_may_have_more_rows_than_tokens_and_still_rows_of_many():
    """Mixed buckets all have the same number of rows, the smallest of them fewer tokens."""
    check(make_batch([(5, 20), (1, 70), (2, 2)], num_tokens=8, num_rows=16))


def test_a_full_batch_has_no_padding():
    check(make_batch([(20, 40), (12, 12)], num_tokens=32, num_rows=2))


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_a_sink_far_from_every_score(logit):
    """It then changes nothing, or takes all of the weight."""
    batch = make_batch(DECODE, 8, 8)
    sinks = np.full(6, logit, np.float32)
    out = attention(*batch.arrays, scale=0.125, sinks=sinks)[: batch.num_tokens]
    if logit > 0:
        assert np.abs(out).max() < 1e-30
    else:
        assert np.array_equal(out, attention(*batch.arrays, scale=0.125)[: batch.num_tokens])


def test_scores_too_large_for_exp():
    batch = make_batch(MIXED, 80, 8)
    check(replace(batch, q=batch.q * 500), limit=1e-3)  # scores of the order of 1000 are exact to 1e-4


@pytest.mark.parametrize(("count", "num_tokens"), [(1, 8), (20, 80)], ids=["decode", "mixed"])
def test_a_row_does_not_depend_on_the_others(count, num_tokens):
    """Bit for bit, within a bucket: its neighbours' number, lengths, chunks and contents change nothing."""
    row = (count, 90)
    alone = make_batch([row], num_tokens, 8)
    expected = attention(*alone.arrays, scale=0.125)[:count]
    others = [(1, 300), (1, 2), (count, 250)]
    for position in range(4):
        rows = [*others[:position], row, *others[position:]]
        batch = make_batch(rows, num_tokens, 8, seed=1)
        copy_row(alone, 0, batch, position)
        out = attention(*batch.arrays, scale=0.125)
        start = batch.cu_q_lens[position]
        assert np.array_equal(out[start : start + count], expected)


def copy_row(source, source_row, target, row):
    """Writes queries and context of a row of one batch over those of another, which has as many."""
    count = source.cu_q_lens[source_row + 1] - source.cu_q_lens[source_row]
    start, source_start = target.cu_q_lens[row], source.cu_q_lens[source_row]
    target.q[start : start + count] = source.q[source_start : source_start + count]
    num_blocks = -(-source.kv_lens[source_row] // source.k_cache.shape[1])
    for cache, source_cache in ((target.k_cache, source.k_cache), (target.v_cache, source.v_cache)):
        blocks, source_blocks = target.block_tables[row, :num_blocks], source.block_tables[source_row, :num_blocks]
        cache[blocks] = source_cache[source_blocks]


def test_the_loop_covers_the_longest_context_of_the_batch_and_no_more():
    """The work of a step follows what is there, not what the tables could hold."""

    @partial(jax.jit, static_argnames="window")
    def context_tiles(*arrays, window):
        work = prepare_attention(*arrays, sizes=Sizes(80, 16, 2, 64))
        return xla.context_tiles(work.tiles, xla.CONTEXT_TILE, window)

    def trips(rows, window=None):
        return tuple(map(int, context_tiles(*make_batch(rows, 80, 8).arrays[3:], window=window)))

    assert trips([(1, 64), (5, 5)]) == (0, 1)
    assert trips([(1, 65), (5, 5)]) == (0, 2)
    assert trips([(20, 300), (1, 1)]) == (0, 5)
    assert trips([(1, 300), (1, 280)], window=20) == (4, 5)
    assert trips([(1, 300), (1, 276)], window=21) == (3, 5)
    assert trips([(1, 300), (1, 1)], window=20) == (0, 5)


def test_query_heads_are_a_multiple_of_the_kv_heads():
    batch = make_batch(DECODE, 8, 8, heads=(5, 3))
    with pytest.raises(AssertionError, match="5 query heads over 3 K/V heads"):
        attention(*batch.arrays, scale=1.0)
