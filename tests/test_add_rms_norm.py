"""The residual sum and its norm: both implementations against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.add_rms_norm import add_rms_norm

BACKENDS = ("xla", "pallas_interpret")


def arrays(tokens, hidden):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((tokens, hidden), (tokens, hidden), (hidden,))
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden", [64, 576])
@pytest.mark.parametrize("adds", [True, False])
def test_sum_and_norm(backend, hidden, adds):
    x, added, scale = arrays(3, hidden)
    total, normed = add_rms_norm(x, added[None] if adds else None, scale, eps=1e-3, backend=backend)
    expected = np.asarray(x + added if adds else x, np.float64)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    root = np.sqrt((expected**2).mean(axis=1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(normed, expected / root * scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_norms_the_rounded_sum(backend):
    x, added, scale = arrays(2, 64)
    x, added = jnp.asarray(x, jnp.bfloat16), jnp.asarray(added, jnp.bfloat16)
    total, normed = add_rms_norm(x, added[None], scale, eps=1e-6, backend=backend)
    assert total.dtype == normed.dtype == jnp.bfloat16
    wide = np.asarray(x + added, np.float64)
    np.testing.assert_array_equal(np.asarray(total, np.float64), wide)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=2**-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_are_added_up(backend):
    x, added, scale = arrays(3, 64)
    parts = jnp.stack([0.25 * added, 0.5 * added, 0.25 * added])
    whole = add_rms_norm(x, added[None], scale, eps=1e-3, backend=backend)
    for one, other in zip(add_rms_norm(x, parts, scale, eps=1e-3, backend=backend), whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
