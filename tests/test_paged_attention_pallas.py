"""The GPU kernels on a CPU, interpreted, against the float64 oracle, and bit by bit against themselves.

Most cases have small splits and tiles, so that short contexts have many of them.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ragged_paged_attention import make_batch, oracle, relative_error

from jaxllm.kernels import ragged_paged_attention_pallas
from jaxllm.kernels.launches import Launch
from jaxllm.kernels.paged_decode import MOST_SPANS_TO_SPLIT, SPLITS_PER_SPAN
from jaxllm.kernels.ragged_paged_attention import ragged_paged_attention

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
CHUNKS = [(40, 70), (1, 300), (17, 17), (9, 161)]

EVERY_OPTION = {"window": WINDOW, "soft_cap": 5.0, "sinks": jnp.linspace(-1, 3, 32)}
CASES = {
    "decode, launch of the table": ([FEW], 4, (3, 3), 64, 16, None, {}),
    "decode, every option": ([FEW, MANY], len(MANY), (32, 2), 80, 32, SMALL, EVERY_OPTION),
    "chunks, launch of the table": ([CHUNKS], 80, (9, 3), 96, 16, None, {"soft_cap": 5.0}),
    "chunks, every option": ([CHUNKS], 67, (32, 2), 64, 128, SMALL, EVERY_OPTION),
}
"""Rows of each step, tokens of a step, query and K/V heads, head size, page, launch, options."""


def pad(rows, num_tokens, heads=(7, 1), head_dim=64, page=16):
    """The batch of a step that decodes if it can."""
    decodes = all(count == 1 for count, _ in rows)
    return make_batch(rows, num_tokens, num_tokens if decodes else len(rows) + 1, heads, head_dim, page)


def compile_attention(monkeypatch, launch, batch, compiler_options=FAST_COMPILE, **options):
    """With this launch, or that of the table."""
    if launch is not None:
        monkeypatch.setattr(ragged_paged_attention_pallas, "find_launch", lambda *_: launch)

    def attend(*arrays):
        return ragged_paged_attention(*arrays, scale=0.1, backend="pallas_interpret", **options)

    return jax.jit(attend).lower(*batch.arrays).compile(compiler_options=compiler_options)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_the_oracle(name, monkeypatch):
    steps, num_tokens, heads, head_dim, page, launch, options = CASES[name]
    batches = [pad(rows, num_tokens, heads, head_dim, page) for rows in steps]
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
    many = pad(MANY, len(MANY))
    few = first_rows(many, len(FEW))
    attention = compile_attention(monkeypatch, SMALL, many, ROUND_PRODUCTS)
    by_span, by_split = (np.asarray(attention(*batch.arrays)) for batch in (many, few))
    assert relative_error(many, by_span, oracle(many, scale=0.1)) < 1e-6
    np.testing.assert_array_equal(by_split[: len(FEW)], by_span[: len(FEW)])


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
    [(FEW, pad(FEW, 6, (2, 2), 64, 128)), (CHUNKS, pad(CHUNKS, 67, (7, 1), 64, 32))],
    ids=["decode", "chunks"],
)
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(rows, batch, monkeypatch):
    attention = compile_attention(monkeypatch, SMALL, batch)
    together = np.asarray(attention(*batch.arrays))
    assert relative_error(batch, together, oracle(batch, scale=0.1)) < 1e-6
    for row, (count, _) in enumerate(rows):
        found = np.asarray(attention(*alone(batch, row).arrays))[:count]
        np.testing.assert_array_equal(found, together[batch.cu_q_lens[row] :][:count])
