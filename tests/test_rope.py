"""Rotary embedding against complex numbers, and frequencies against transformers'."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.rotate_and_write import rotate
from jaxllm.model_config import RopeConfig
from jaxllm.models.rope import inverse_frequencies, rope_tables

POSITIONS = np.array([0, 1, 7, 100, 8191])


def as_complex(x):
    """Dimension i is the real part of number i, dimension i + head_dim / 2 the imaginary one."""
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return first + 1j * second


@pytest.mark.parametrize("heads", [(), (3,), (3, 4)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 96])
def test_rotation_multiplies_complex_numbers(heads, head_dim):
    frequencies = inverse_frequencies(RopeConfig(theta=10000.0), head_dim)
    assert frequencies.dtype == np.float32 and frequencies.shape == (head_dim // 2,)
    x = np.random.default_rng(0).standard_normal((len(POSITIONS), *heads, head_dim)).astype(np.float32)
    rotated = rotate(jnp.asarray(x), *rope_tables(jnp.asarray(POSITIONS), frequencies))
    angles = np.float32(POSITIONS)[:, None] * frequencies  # rounded to float32, as the reference models do
    turn = np.exp(1j * angles.astype(np.float64)).reshape(len(POSITIONS), *(1 for _ in heads), -1)
    assert rotated.shape == x.shape and rotated.dtype == np.float32
    assert np.allclose(as_complex(rotated), as_complex(x) * turn, atol=1e-6)


def test_scores_depend_on_the_distance_alone():
    frequencies = inverse_frequencies(RopeConfig(), 32)
    q, k = np.random.default_rng(1).standard_normal((2, 32)).astype(np.float32)

    def score(query_position, key_position):
        tables = rope_tables(jnp.array([query_position, key_position]), frequencies)
        rotated = rotate(jnp.stack([q, k]), *tables)
        return float(rotated[0] @ rotated[1])

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(2, 5), abs=1e-2)


def test_the_first_position_is_not_rotated_and_keeps_its_type():
    x = jnp.ones((1, 2, 16), jnp.bfloat16)
    rotated = rotate(x, *rope_tables(jnp.array([0]), inverse_frequencies(RopeConfig(), 16)))
    assert rotated.dtype == jnp.bfloat16 and (rotated == x).all()


def test_bfloat16_is_rotated_in_float32():
    """At position 8191 angles and products need more than 8 bits."""
    frequencies = inverse_frequencies(RopeConfig(), 16)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 16)), jnp.bfloat16)
    tables = rope_tables(jnp.array([8191]), frequencies)
    exact = rotate(x.astype(jnp.float32), *tables)
    assert (rotate(x, *tables) == exact.astype(jnp.bfloat16)).all()


def test_unscaled_frequencies():
    expected = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    assert np.allclose(inverse_frequencies(RopeConfig(theta=500000.0), 64), expected, rtol=1e-6)


LLAMA3 = {
    "Llama 3.1": (
        RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        [
            1.0,
            0.193922758102417,
            0.03760603070259094,
            0.00729266507551074,
            0.0005248460220173001,
            3.428102354519069e-05,
            6.647869668086059e-06,
            1.289173155782919e-06,
        ],
    ),
    "other factors": (
        RopeConfig(10000.0, "llama3", 32.0, 1.5, 6.0, 1000),
        [
            1.0,
            0.46415889263153076,
            0.2154434472322464,
            0.10000000149011612,
            0.04641588404774666,
            0.009619487449526787,
            0.0005095854867249727,
            0.00014504967839457095,
            6.732607289450243e-05,
            3.125000148429535e-05,
            1.4504967111861333e-05,
            6.732606834702892e-06,
        ],
    ),
}
"""Configurations and what ROPE_INIT_FUNCTIONS["llama3"] of transformers 5.24 makes of them."""


@pytest.mark.parametrize(("rope", "expected"), LLAMA3.values(), ids=LLAMA3)
def test_llama3_scaling(rope, expected):
    assert np.allclose(inverse_frequencies(rope, 2 * len(expected)), expected, rtol=1e-6, atol=0)


def test_frequency_factors_divide():
    """How GGUF files write a scaling down."""
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 16)
    rope, expected = LLAMA3["Llama 3.1"]
    factors = tuple(float(factor) for factor in plain / np.float32(expected))
    scaled = inverse_frequencies(RopeConfig(theta=rope.theta, freq_factors=factors), 16)
    assert np.allclose(scaled, expected, rtol=1e-6, atol=0)
    assert not np.allclose(scaled, plain, rtol=1e-2, atol=0)
