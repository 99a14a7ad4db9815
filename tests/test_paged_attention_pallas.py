"""The GPU kernels on a CPU, interpreted, against the float64 oracle, and bit by bit against themselves.

Most cases have small splits and tiles, so that short contexts have many of them.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ragged_paged_attention import make_batch, oracle, relative_error

from jaxllm.kernels import launches, paged_chunks, ragged_paged_attention_pallas
from jaxllm.kernels.launches import Launch
from jaxllm.kernels.paged_decode import MOST_SPANS_TO_SPLIT, SPLITS_PER_SPAN
from jaxllm.kernels.ragged_paged_attention import Sizes, ragged_paged_attention

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ROUND_PRODUCTS = FAST_COMPILE | {"xla_disable_hlo_passes": "fusion"}
"""An operation at a time: else a CPU may skip the rounding of a product that is added to something, or may not."""
SMALL = Launch(split=32, context_tile=16, rows=32, num_warps=4, num_stages=2)
SPAN = SMALL.split * SPLITS_PER_SPAN
WINDOW = 20

FEW = [(1, 5), (1, SPAN), (1, 300), (1, SPAN + 1)]
"""A decode step that has an item per split."""
MANY = [*FEW, *((1, length) for length in range(260, 300, 3))]
"""One that has an item per span."""
CHUNKS = [(40, 70), (17, 17), (9, 161), (2, 300)]
MIXED = [(1, 290), *CHUNKS[:2], *FEW, *CHUNKS[2:], (1, 1)]
MIXED_MANY = [*MANY[:9], (3, 40), *MANY[9:], (5, 290)]

EVERY_OPTION = {"window": WINDOW, "soft_cap": 5.0, "sinks": jnp.linspace(-1, 3, 32)}
CASES = {
    "decode, launch of the table": ([FEW], (4, 4), (3, 3), 64, 16, None, {}),
    "decode, every option": ([FEW, MANY], (18, 18), (32, 2), 80, 32, SMALL, EVERY_OPTION),
    "chunks": ([CHUNKS, [(68, 300)]], (68, 5), (9, 3), 96, 16, SMALL, {"soft_cap": 5.0}),
    "mixed, launch of the table": ([MIXED, CHUNKS, FEW], (80, 10), (5, 1), 128, 64, None, {}),
    "mixed, every option": ([MIXED, MIXED_MANY, CHUNKS, FEW], (76, 20), (32, 2), 64, 128, SMALL, EVERY_OPTION),
    "mixed, a group of one": ([MIXED], (76, 10), (2, 2), 256, 32, SMALL, {"window": WINDOW}),
    "mixed, a group of twelve": ([MIXED], (76, 10), (12, 1), 80, 16, SMALL, {"sinks": jnp.linspace(-1, 3, 12)}),
}
"""Rows of each step, tokens and rows of the bucket, query and K/V heads, head size, page, launch, options."""


def pad(rows, bucket, heads=(7, 1), head_dim=64, page=16):
    """The batch of a step of this bucket; one with as many rows as tokens decodes."""
    return make_batch(rows, *bucket, heads, head_dim, page)


def compile_attention(monkeypatch, launch, batch, compiler_options=FAST_COMPILE, **options):
    """With this launch and few programs, or as the table says."""
    if launch is not None:
        monkeypatch.setattr(ragged_paged_attention_pallas, "find_launch", lambda *_: launch)
        monkeypatch.setattr(paged_chunks, "num_programs", lambda *_: 3)

    single = len(batch.q) == len(batch.kv_lens)

    def attend(*arrays):
        return ragged_paged_attention(
            *arrays, scale=0.1, backend="pallas_interpret", single_queries=single, **options
        )  # fmt: skip

    return jax.jit(attend).lower(*batch.arrays).compile(compiler_options=compiler_options)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_the_oracle(name, monkeypatch):
    steps, bucket, heads, head_dim, page, launch, options = CASES[name]
    batches = [pad(rows, bucket, heads, head_dim, page) for rows in steps]
    attention = compile_attention(monkeypatch, launch, batches[0], **options)
    for batch in batches:
        assert relative_error(batch, attention(*batch.arrays), oracle(batch, scale=0.1, **options)) < 1e-6


def test_the_cases_are_what_they_are_called():
    spans = [sum((length - 1) // SPAN + 1 for _, length in rows) for rows in (FEW, MANY)]
    assert spans[0] <= MOST_SPANS_TO_SPLIT < spans[1]
    # Windows that begin inside a later span.
    assert any(length > SPAN and (length - WINDOW) % SPAN > SMALL.context_tile for _, length in FEW)


def first_rows(batch, count):
    """The step without its later rows; one token a row."""
    kept = np.arange(len(batch.kv_lens)) < count
    return replace(batch, kv_lens=batch.kv_lens * kept, cu_q_lens=np.minimum(batch.cu_q_lens, np.int32(count)))


def test_a_program_per_split_and_one_per_span_give_the_same_bits(monkeypatch):
    many = pad(MANY, (len(MANY), len(MANY)))
    few = first_rows(many, len(FEW))
    attention = compile_attention(monkeypatch, SMALL, many, ROUND_PRODUCTS)
    by_span, by_split = (np.asarray(attention(*batch.arrays)) for batch in (many, few))
    assert relative_error(many, by_span, oracle(many, scale=0.1)) < 1e-6
    np.testing.assert_array_equal(by_split[: len(FEW)], by_span[: len(FEW)])


def decode_step(batch, num_rows):
    """The tokens of rows that have one, and the step in which these rows are alone."""
    rows = np.flatnonzero(np.diff(batch.cu_q_lens) == 1)
    tokens, spare = batch.cu_q_lens[rows], num_rows - len(rows)
    return tokens, replace(
        batch,
        q=np.pad(batch.q[tokens], ((0, spare), (0, 0), (0, 0))),
        block_tables=np.pad(batch.block_tables[rows], ((0, spare), (0, 0))),
        kv_lens=np.pad(batch.kv_lens[rows], (0, spare)),
        cu_q_lens=np.minimum(np.arange(num_rows + 1), len(rows)).astype(np.int32),
    )


def test_a_token_has_the_same_bits_beside_chunks(monkeypatch):
    batches = [pad(rows, (76, 20)) for rows in (MIXED, MIXED_MANY)]
    beside_chunks = compile_attention(monkeypatch, SMALL, batches[0], ROUND_PRODUCTS)
    by_itself = compile_attention(monkeypatch, SMALL, decode_step(batches[0], 18)[1], ROUND_PRODUCTS)
    for batch in batches:
        found = np.asarray(beside_chunks(*batch.arrays))
        assert relative_error(batch, found, oracle(batch, scale=0.1)) < 1e-6
        tokens, decode = decode_step(batch, 18)
        assert len(tokens) in (len(FEW) + 2, len(MANY))
        np.testing.assert_array_equal(found[tokens], by_itself(*decode.arrays)[: len(tokens)])


def test_a_decoded_token_has_the_bits_of_a_chunk(monkeypatch):
    """In the mode that promises it. What of this is due to matrix units, `scripts/check_invariance.py` shows on a GPU."""
    options = {"soft_cap": 5.0, "sinks": jnp.linspace(-1, 3, 12)}
    chunk = pad([(90, 190)], (90, 3), (12, 2))
    tokens = np.array([0, 1, 17, 60, 88, 89])
    rows = len(tokens)
    decode = replace(
        chunk,
        q=chunk.q[tokens],
        block_tables=np.repeat(chunk.block_tables[:1], rows, axis=0),
        kv_lens=(tokens + 101).astype(np.int32),
        cu_q_lens=np.arange(rows + 1, dtype=np.int32),
    )
    found = {}
    for name, batch in (("chunk", chunk), ("decode", decode)):
        attention = compile_attention(monkeypatch, SMALL, batch, ROUND_PRODUCTS, invariant=True, **options)
        found[name] = np.asarray(attention(*batch.arrays))
        assert relative_error(batch, found[name], oracle(batch, scale=0.1, **options)) < 1e-6
    np.testing.assert_array_equal(found["decode"], found["chunk"][tokens])


def test_launches_that_promise_the_same_bits_have_the_same_sums():
    for table in launches._read_table().values():
        for decode, chunks in zip(table["invariant_decode"], table["invariant_chunks"], strict=True):
            fields = ("head_dim", "split", "context_tile")
            assert [decode[field] for field in fields] == [chunks[field] for field in fields]


@pytest.mark.parametrize(
    ("num_tokens", "group", "rows", "num_warps"),
    [(8192, 4, 256, 8), (1024, 4, 256, 8), (512, 4, 128, 8), (128, 4, 64, 4), (128, 1, 64, 4), (16, 71, 128, 8)],
)
def test_tiles_are_smaller_where_tokens_are_few(num_tokens, group, rows, num_warps):
    launch = Launch(split=1024, context_tile=64, rows=256, num_warps=8, num_stages=2)
    assert paged_chunks.fit(launch, num_tokens, group) == launch._replace(rows=rows, num_warps=num_warps)


def random_lengths(rng, num_tokens, num_rows):
    """Queries and contexts of rows that fit, most of them of one token."""
    counts = []
    while len(counts) < num_rows and (left := num_tokens - sum(counts)):
        counts.append(min(left, int(rng.choice([1, 1, 1, 2, 8, 9, rng.integers(1, 60)]))))
    return [(count, count + int(rng.integers(0, 400))) for count in counts[: rng.integers(1, num_rows + 1)]]


def test_every_token_is_in_one_list_and_every_context_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(ragged_paged_attention_pallas, "find_launch", lambda *_: SMALL)
    tables, rng = np.zeros((12, 32), np.int32), np.random.default_rng(0)
    prepare = jax.jit(partial(ragged_paged_attention_pallas.prepare, sizes=Sizes(96, 16, 3, 64)))
    for _ in range(40):
        rows = np.array(random_lengths(rng, 96, 12))
        padded = np.pad(rows, ((0, 12 - len(rows)), (0, 0)))
        cu_q_lens = np.concatenate([[0], np.cumsum(padded[:, 0])])
        work = jax.tree.map(np.asarray, prepare(tables, padded[:, 1], cu_q_lens))
        decode, chunks = work.decode, work.chunks
        items = jax.tree.map(lambda field: field[: decode.ends[-1]], decode.items)  # noqa: B023 - used at once
        begins = items.token[items.start == 0]
        tiles = [token + np.arange(size) for token, size in zip(chunks.token, chunks.num_tokens, strict=True)]
        assert sorted([*begins, *np.concatenate(tiles)]) == list(range(cu_q_lens[-1]))
        size = SMALL.split * decode.splits_per_item[0]
        read = np.bincount(items.row, minlength=12) * size
        contexts = np.where(padded[:, 0] == 1, padded[:, 1], 0)
        assert ((contexts <= read) & (read < contexts + size)).all()
        walked = np.where(chunks.num_tokens, chunks.position + chunks.num_tokens, 0)
        assert (np.diff(walked) <= 0).all(), "the longest begin first"
        last = dict(zip(chunks.row[::-1], walked[::-1], strict=True))
        assert all(last[row] == length for row, (count, length) in enumerate(rows) if count > 1)


def alone(batch, row):
    """The row as the only one of a step of the same shape."""
    start, stop = batch.cu_q_lens[row : row + 2]
    kv_lens, cu_q_lens = np.zeros_like(batch.kv_lens), np.full_like(batch.cu_q_lens, stop - start)
    kv_lens[0], cu_q_lens[0] = batch.kv_lens[row], 0
    return replace(
        batch,
        q=np.roll(batch.q, -start, axis=0),
        block_tables=np.roll(batch.block_tables, -row, axis=0),
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
    )


@pytest.mark.parametrize(
    ("rows", "batch"),
    [(FEW, pad(FEW, (6, 6), (2, 2), 64, 128)), (MIXED, pad(MIXED, (76, 10), (7, 1), 64, 32))],
    ids=["decode", "mixed"],
)
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(rows, batch, monkeypatch):
    attention = compile_attention(monkeypatch, SMALL, batch)
    together = np.asarray(attention(*batch.arrays))
    assert relative_error(batch, together, oracle(batch, scale=0.1)) < 1e-6
    for row, (count, _) in enumerate(rows):
        found = np.asarray(attention(*alone(batch, row).arrays))[:count]
        np.testing.assert_array_equal(found, together[batch.cu_q_lens[row] :][:count])
