"""The GPU kernels on a CPU, interpreted, against the XLA backend, which has an oracle of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.ragged_paged_attention import ragged_paged_attention

BLOCK_SIZE = 16
CASES = {
    "decode": ([(1, 5), (1, 70), (1, 300)], 4, 9, 3, 64, {}),
    "decode over several splits": ([(1, 1030), (1, 2100)], 2, 4, 2, 64, {}),
    "decode with every option": ([(1, 5), (1, 70), (1, 300)], 4, 6, 3, 80, {"window": 20, "soft_cap": 5.0}),
    "chunks beside decode rows": ([(40, 70), (1, 300), (17, 17)], 80, 9, 3, 64, {}),
    "chunks with every option": ([(40, 70), (1, 300)], 64, 4, 1, 96, {"window": 20, "soft_cap": 5.0}),
}


def make_arrays(rows, num_tokens, num_heads, num_kv_heads, head_dim):
    """q, caches, tables, lengths; every slot that no row owns holds NaN."""
    rng = np.random.default_rng(0)
    num_rows, max_blocks = len(rows) + 1, -(-max(kv_len for _, kv_len in rows) // BLOCK_SIZE)
    shape = (num_rows * max_blocks + 1, BLOCK_SIZE, num_kv_heads, head_dim)
    caches = [np.full(shape, np.nan, np.float32) for _ in "kv"]
    tables = np.zeros((num_rows, max_blocks), np.int32)
    free = list(rng.permutation(np.arange(1, shape[0])))
    for row, (_, kv_len) in enumerate(rows):
        for position in range(kv_len):
            if position % BLOCK_SIZE == 0:
                tables[row, position // BLOCK_SIZE] = free.pop()
            for cache in caches:
                cache[tables[row, position // BLOCK_SIZE], position % BLOCK_SIZE] = rng.standard_normal(shape[2:])
    q_lens = [q_len for q_len, _ in rows] + [0]
    kv_lens = np.array([kv_len for _, kv_len in rows] + [0], np.int32)
    q = rng.standard_normal((num_tokens, num_heads, head_dim)).astype(np.float32)
    return q, *caches, tables, kv_lens, np.cumsum([0, *q_lens]).astype(np.int32)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_the_xla_backend(name, with_sinks):
    rows, *sizes, options = CASES[name]
    arrays = make_arrays(rows, *sizes)
    sinks = jnp.linspace(-1, 3, sizes[1]) if with_sinks else None

    def run(backend):
        attention = jax.jit(lambda *a: ragged_paged_attention(*a, scale=0.1, sinks=sinks, backend=backend, **options))
        return np.asarray(attention(*arrays))[: sum(q_len for q_len, _ in rows)]

    expected, found = run("xla"), run("pallas_interpret")
    assert np.isfinite(expected).all()
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-5
