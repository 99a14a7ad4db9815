"""The projection with one order of sums, interpreted on a CPU, against float64. That its bits never change is a fact
about matrix units: `scripts/check_invariance.py` shows it on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import EngineConfig
from jaxllm.kernels import invariant_linear as module
from jaxllm.kernels.invariant_linear import Tile, choose_tile, invariant_linear, invariant_parts
from jaxllm.model_config import ModelConfig
from jaxllm.models.layers import QKNorm, Setting, Split, multiply
from jaxllm.parallel.mesh import TENSOR_AXIS

MODEL = ModelConfig("olmo2", 64, 32, 1, 4, 2, 8, 64, 64, qk_norm="all")


def make(num_tokens, outputs, inputs, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(num_tokens), 2)
    size = np.prod(inputs)
    x = jax.random.normal(keys[0], (num_tokens, *inputs), dtype)
    weight = jax.random.normal(keys[1], (*outputs, *inputs)) / size**0.5
    return x, weight.astype(dtype)


def expected(x, weight, num_inputs):
    x, weight = (np.asarray(array, np.float64) for array in (x, weight))
    return np.tensordot(x, weight, (range(-num_inputs, 0), range(-num_inputs, 0)))


def assert_close(found, x, weight, num_inputs):
    assert found.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected(x, weight, num_inputs), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "outputs", "inputs"),
    [(1, (96,), (64,)), (40, (3, 2, 16), (80,)), (70, (33,), (4, 24)), (32, (64,), (128,))],
)
def test_any_size(num_tokens, outputs, inputs, weight_first):
    """Tokens, outputs and inputs that fill their tiles, and that do not."""
    x, weight = make(num_tokens, outputs, inputs)
    tile = Tile(16, 32, 64, 4, 2, weight_first)
    found = invariant_linear(x, weight, num_inputs=len(inputs), tile=tile, interpret=True)
    assert found.shape == (num_tokens, *outputs)
    assert_close(found, x, weight, len(inputs))


def test_the_tiles_of_every_size(monkeypatch):
    """Those of `choose_tile`, on a product so small that most of a tile is masked; more rows of tiles than go abreast."""
    monkeypatch.setattr(module, "TILES_ABREAST", 2)
    for num_tokens in (1, 17, 65, 600):
        x, weight = make(num_tokens, (40,), (48,))
        assert_close(invariant_linear(x, weight, num_inputs=1, interpret=True), x, weight, 1)


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "tokens", "outputs"),
    [
        *((1, 28672, 16, 64), (16, 4096, 16, 32), (17, 6144, 64, 64), (64, 1024, 64, 32), (256, 28672, 128, 256)),
        *((256, 6144, 128, 128), (256, 4096, 128, 64), (128, 4096, 64, 64), (8192, 4096, 128, 256), (65, 40, 64, 64)),
    ],
)
def test_tiles_are_smaller_where_there_are_few(num_tokens, num_outputs, tokens, outputs):
    assert choose_tile(num_tokens, num_outputs)[:2] == (tokens, outputs)


@pytest.mark.parametrize(("inputs", "num_parts"), [((512,), 2), ((2, 320), 1), ((128,), 1)])
def test_a_long_sum_has_two_parts_whatever_the_tokens(inputs, num_parts, monkeypatch):
    monkeypatch.setattr(module, "LONG_SUM", 256)
    for num_tokens in (1, 70):
        x, weight = make(num_tokens, (40,), inputs)
        parts = invariant_parts(x, weight, num_inputs=len(inputs), interpret=True)
        assert (parts.shape, parts.dtype) == (
            (num_parts, num_tokens, 40),
            jnp.float32 if num_parts > 1 else jnp.bfloat16,
        )
        assert_close(parts.sum(axis=0).astype(jnp.bfloat16), x, weight, len(inputs))


def test_nothing_is_read_past_the_end():
    x, weight = make(5, (24,), (40,))
    padded = jnp.pad(x, ((0, 0), (0, 8)), constant_values=jnp.nan)
    found = jax.jit(lambda x, w: invariant_linear(x[:, :40], w, num_inputs=1, interpret=True))(padded, weight)
    assert_close(found, x, weight, 1)


@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_on_several_devices(split):
    """Each device has a part of the weight; the result is the same product."""
    mesh = Mesh(np.array(jax.devices()[:2]), (TENSOR_AXIS,))
    setting = Setting(jnp.dtype("bfloat16"), mesh, "pallas_interpret", batch_invariant=True)
    x, weight = make(3, (32,), (64,))
    sharded, whole = ("intermediate", 32 if split == "outputs" else 64), ("hidden", 64 if split == "outputs" else 32)
    axes = Split.of([whole], [sharded]) if split == "outputs" else Split.of([sharded], [whole])
    weight = jax.device_put(weight, NamedSharding(mesh, PartitionSpec(*axes.outputs, *axes.inputs)))
    found = jax.jit(lambda x, weight: multiply(x, weight, axes, setting))(x, weight)
    assert_close(found, x, weight, 1)


def test_sums_over_many_devices_have_the_order_of_the_devices():
    """Of more than two: in float32, one after the other, rounded once. A CPU's own sums have this order, too."""
    mesh = Mesh(np.array(jax.devices()[:4]), (TENSOR_AXIS,))
    setting = Setting(jnp.dtype("bfloat16"), mesh, "pallas_interpret", batch_invariant=True)
    x, weight = make(40, (32,), (256,))
    axes = Split.of([("intermediate", 256)], [("hidden", 32)])
    placed = jax.device_put(weight, NamedSharding(mesh, PartitionSpec(*axes.outputs, *axes.inputs)))
    program = jax.jit(lambda x, weight: multiply(x, weight, axes, setting)).trace(x, placed)
    assert "all_gather" in str(program.jaxpr) and "psum" not in str(program.jaxpr)
    found = program.lower().compile()(x, placed)
    total = jnp.zeros((40, 32))
    for start in range(0, 256, 64):
        part = slice(start, start + 64)
        total += invariant_linear(x[:, part], weight[:, part], num_inputs=1, interpret=True).astype(jnp.float32)
    np.testing.assert_array_equal(found, total.astype(jnp.bfloat16))


@pytest.mark.parametrize("size", [1, 2])
def test_the_norm_over_all_heads(size):
    """The numbers are XLA's; a program norms one vector of a token, so that its order of sums is the token's own."""
    mesh = Mesh(np.array(jax.devices()[:size]), (TENSOR_AXIS,))
    keys = jax.random.split(jax.random.key(size), 2)
    qkv, scale = jax.random.normal(keys[0], (33, 2, 4, 8), jnp.bfloat16), jax.random.normal(keys[1], (2, 3, 8))
    qkv = jax.device_put(qkv, NamedSharding(mesh, PartitionSpec(None, TENSOR_AXIS)))
    found = {}
    for invariant in (False, True):
        norm = QKNorm(MODEL, Setting(jnp.dtype("bfloat16"), mesh, "pallas_interpret", batch_invariant=invariant))
        norm.scale[...] = scale
        found[invariant] = jax.jit(norm.over_heads)(qkv)
        kernels = str(jax.make_jaxpr(norm.over_heads)(qkv)).count("name=add_rms_norm")
        assert kernels == (2 if invariant else 0)
    fastest, in_one_order = (np.asarray(one, np.float32) for one in found.values())
    np.testing.assert_allclose(in_one_order, fastest, rtol=2**-7, atol=1e-6)
    np.testing.assert_array_equal(in_one_order[:, :, -1], np.asarray(qkv, np.float32)[:, :, -1])


@pytest.mark.parametrize(
    ("fields", "platform", "message"),
    [
        ({}, "cpu", "needs a GPU"),
        ({"dtype": "float32"}, "gpu", "dtype is float32"),
        ({"attention_backend": "xla"}, "gpu", "needs attention_backend='pallas'"),
    ],
)
def test_where_there_is_no_such_mode(fields, platform, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig("m", batch_invariant=True, **fields).resolve(MODEL, platform)


def test_a_float32_checkpoint_is_computed_in_bfloat16():
    assert MODEL.dtype == "float32"
    assert EngineConfig("m", batch_invariant=True).resolve(MODEL, "gpu").dtype == "bfloat16"
