"""Rotation and the write to the cache: the GPU kernel, interpreted, against the XLA implementation, and that against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.rotate_and_write import HeadNorm, rotate_and_write

BLOCKS, BLOCK_SIZE = 24, 16
CASES = {
    "plain": (5, 2, 3, 64, 32, False),
    "normed": (5, 2, 1, 64, 32, True),
    "odd sizes": (3, 3, 9, 80, 40, True),
    "partly rotated": (4, 1, 4, 96, 16, True),
    "in parts": (5, 2, 3, 64, 32, True, 4),
    "many tokens": (290, 1, 2, 64, 32, True),
}


def make(tokens, kv_heads, group, head_dim, half, with_norm, splits=1):
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((splits, tokens, kv_heads, group + 2, head_dim)).astype(np.float32)
    angles = rng.uniform(0, 6, (tokens, half)).astype(np.float32)
    caches = [rng.standard_normal((BLOCKS, BLOCK_SIZE, kv_heads, head_dim)).astype(np.float32) for _ in "kv"]
    slots = rng.permutation(BLOCKS * BLOCK_SIZE)[:tokens]
    block, offset = (slots // BLOCK_SIZE).astype(np.int32), (slots % BLOCK_SIZE).astype(np.int32)
    block[-1] = BLOCKS  # padding
    norm = HeadNorm(jnp.asarray(rng.standard_normal((group + 1, head_dim)), jnp.float32), 1e-5) if with_norm else None
    arrays = (qkv, np.cos(angles), np.sin(angles), *caches, block, offset)
    return tuple(map(jnp.asarray, arrays)), norm


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_xla(name):
    arrays, norm = make(*CASES[name])
    expected = rotate_and_write(*arrays, norm=norm)
    kernel = jax.jit(lambda *a: rotate_and_write(*a, norm=norm, backend="pallas_interpret"))
    found = kernel(*arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
def test_values_go_to_their_slots_and_nothing_else_changes(backend):
    arrays, _ = make(5, 2, 3, 64, 32, False)
    qkv, block, offset = (np.asarray(arrays[index]) for index in (0, 5, 6))
    _, keys, values = rotate_and_write(*arrays, backend=backend)
    expected = np.array(arrays[4])
    expected[block[:-1], offset[:-1]] = qkv[0, :-1, :, -1]
    np.testing.assert_array_equal(values, expected)
    changed = np.unique(np.argwhere(np.asarray(keys) != arrays[3])[:, :2], axis=0)
    assert {tuple(slot) for slot in changed} == set(zip(block[:-1].tolist(), offset[:-1].tolist(), strict=True))


def test_bfloat16_norms_before_it_rotates_and_rounds_in_between():
    arrays, norm = make(4, 2, 2, 64, 32, True)
    arrays = (arrays[0].astype(jnp.bfloat16), *arrays[1:])
    expected, found = (rotate_and_write(*arrays, norm=norm, backend=b)[0] for b in ("xla", "pallas_interpret"))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=2**-7, atol=1e-3)
