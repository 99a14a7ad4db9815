"""The two forms of a linear map against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.linear import WEIGHT_FIRST_TOKENS, linear

SHAPES = {
    "matrix": ((24,), (40,)),
    "several outputs": ((3, 5, 8), (40,)),
    "several inputs": ((24,), (6, 7)),
    "several of both": ((4, 2), (3, 5, 2)),
}
"""Axes of outputs and inputs."""

jitted = jax.jit(linear, static_argnames=("num_inputs", "platform"))


def operands(num_tokens, outputs, inputs, dtype=np.float32):
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, *inputs)).astype(dtype)
    return x, rng.standard_normal((*outputs, *inputs)).astype(dtype)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 16, 200])
def test_the_last_axes_are_contracted(platform, outputs, inputs, num_tokens):
    x, weight = operands(num_tokens, outputs, inputs)
    y = jitted(x, weight, num_inputs=len(inputs), platform=platform)
    expected = np.tensordot(x.astype(np.float64), weight.astype(np.float64), (range(1, x.ndim), range(-len(inputs), 0)))
    assert y.shape == (num_tokens, *outputs) and y.dtype == np.float32
    assert np.abs(y - expected).max() / np.abs(expected).max() < 1e-6


def test_both_forms_agree_for_any_number_of_tokens():
    for num_tokens in (*range(1, 10), *range(15, 200, 16), *range(16, 201, 23)):
        x, weight = operands(num_tokens, (4, 2), (3, 5))
        forms = [jitted(x, weight, num_inputs=2, platform=platform) for platform in ("cpu", "gpu")]
        assert forms[0].shape == forms[1].shape == (num_tokens, 4, 2)
        assert np.abs(np.subtract(*forms)).max() / np.abs(forms[1]).max() < 1e-6


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_result_has_the_type_of_the_input(platform):
    x, weight = operands(16, (24,), (40,), jnp.bfloat16)
    y = jitted(x, weight, num_inputs=1, platform=platform)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    assert y.dtype == jnp.bfloat16
    assert np.abs(np.asarray(y, np.float64) - expected).max() / np.abs(expected).max() < 2.0**-7


@pytest.mark.parametrize(("num_tokens", "kept"), [(1, False), (2, True), (WEIGHT_FIRST_TOKENS, True), (100, False)])
def test_the_weight_goes_first_where_that_is_faster(num_tokens, kept):
    """The barrier is what keeps the CPU compiler from swapping the operands back."""
    x, weight = operands(num_tokens, (24,), (40,))
    text = {platform: jitted.lower(x, weight, num_inputs=1, platform=platform).as_text() for platform in ("cpu", "gpu")}
    assert ("optimization_barrier" in text["cpu"]) == kept
    assert "optimization_barrier" not in text["gpu"]
