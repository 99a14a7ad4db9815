"""How heads and sizes are shared out to devices, evenly or not, and parameters accordingly."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from many_heads import MODEL

from jaxllm.models.expansion import Expansion, stored_specs, whole_axis
from jaxllm.models.layers import Setting
from jaxllm.models.parameters import define_model
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.parallel.partition import EMPTY, place_heads, split_over


def model_with(num_heads, num_kv_heads, **fields):
    return dataclasses.replace(MODEL, num_heads=num_heads, num_kv_heads=num_kv_heads, **fields)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (64, 8), (14, 2), (8, 1), (6, 6)])
@pytest.mark.parametrize("size", range(1, 17))
def test_every_query_head_has_one_place_beside_its_kv_head(num_heads, num_kv_heads, size):
    heads = place_heads(model_with(num_heads, num_kv_heads), size)
    queries = [[heads.query_head(place, n) for n in range(heads.group_places)] for place in range(heads.kv_places)]
    counts = Counter(query for group in queries for query in group)
    del counts[EMPTY]
    assert counts == Counter(range(num_heads))
    for place, group in enumerate(queries):
        assert {query // (num_heads // num_kv_heads) for query in group if query != EMPTY} <= {heads.kv_head(place)}
    per_device = heads.kv_places // size
    devices = [queries[start : start + per_device] for start in range(0, heads.kv_places, per_device)]
    assert len(devices) == size
    idle = sum(all(query == EMPTY for group in device for query in group) for device in devices)
    assert idle == heads.idle_devices
    empty = heads.kv_places * heads.group_places - num_heads
    assert heads.empty_share == pytest.approx(empty / (empty + num_heads))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "per_device"),
    [
        (32, 8, 1, (8, 4)),
        (32, 8, 8, (1, 4)),
        (32, 8, 16, (1, 2)),
        (9, 3, 2, (2, 3)),
        (8, 1, 4, (1, 2)),
        (14, 2, 8, (1, 2)),
    ],
)
def test_places_of_a_device(num_heads, num_kv_heads, size, per_device):
    """K/V heads, and query heads beside each."""
    heads = place_heads(model_with(num_heads, num_kv_heads), size)
    assert (heads.kv_places // size, heads.group_places) == per_device


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_model_that_divides_is_computed_as_it_is(size, caplog):
    assert split_over(MODEL, size) == MODEL
    assert caplog.text == ""


@pytest.mark.parametrize("size", [4, 5, 7, 13])
def test_a_size_that_does_not_work_names_those_that_do(size):
    message = rf"tensor_parallel_size={size} leaves \d+ devices without a head \(18 query and 6 K/V heads\): "
    with pytest.raises(ValueError, match=message + r"this model works with 1, 2, 3, 6, 12, 18$"):
        split_over(MODEL, size)


def test_a_size_that_wastes_is_a_warning(caplog):
    split = split_over(model_with(9, 3, intermediate_size=50), 6)
    assert (split.num_kv_heads, split.num_heads, split.intermediate_size) == (6, 12, 96)
    assert split.vocab_size == MODEL.vocab_size
    assert caplog.messages == [
        "tensor_parallel_size=6 is slow: 25 % of the places for query heads stay empty (9 query and 3 K/V heads); "
        "the intermediate size 50 is padded to 96. Sizes without loss: 1"
    ]


def test_norms_over_all_heads_need_all_places_filled():
    model = model_with(18, 6, qk_norm="all")
    assert split_over(model, 18).num_kv_heads == 18
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=12 does not divide the heads.*works with 1, 2, 3, 6, 18$"
    ):
        split_over(model, 12)


def define(model, size):
    mesh = Mesh(np.array(jax.devices()[:size]), (TENSOR_AXIS,))
    return define_model(split_over(model, size), Setting(jnp.dtype("float32"), mesh, "xla")).specs


FULL = model_with(6, 2, attention_bias=True, mlp_bias=True, attention_out_bias=True, vocab_size=59)
MODELS = {
    "biases": FULL,
    "norms of heads": dataclasses.replace(FULL, qk_norm="head"),
    "norms of all heads": dataclasses.replace(FULL, qk_norm="all"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4, 6])
def test_parameters_have_on_one_device_the_shape_of_a_checkpoint(name, size):
    model = MODELS[name]
    if model.qk_norm == "all" and size == 4:
        pytest.skip("refused")
    one, specs = define(model, 1), define(model, size)
    stored = stored_specs(specs, model)
    assert {path: spec.shape for path, spec in stored.items()} == {path: spec.shape for path, spec in one.items()}
    for path, spec in specs.items():
        array = np.random.default_rng(1).standard_normal(stored[path].shape).astype(np.float32)
        expanded = Expansion.of(path, spec, model).apply(array)
        assert expanded.shape == spec.shape
        np.testing.assert_array_equal(expanded, Expansion.of(path, spec, model).apply(jnp.asarray(array)))
        assert Expansion.of(path, stored[path], model).apply(array) is array


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_an_axis_that_every_device_has_whole(name, size):
    """Along it arrays are cut into pieces: no device has a part of it, and no mesh changes its size."""
    model = MODELS[name]
    specs = define(model, size)
    stored = stored_specs(specs, model)
    for path, spec in specs.items():
        axis = whole_axis(path) % len(spec.shape)
        for one in (spec, stored[path]):
            assert (*one.sharding.spec, *[None] * len(one.shape))[axis] is None, path
        assert spec.shape[axis] == stored[path].shape[axis], path


def test_what_the_places_of_a_projection_hold():
    """6 query and 2 K/V heads on 4 devices: two copies of each K/V head, with 2 and 1 of its queries."""
    path, spec = "layers.0.attention.qkv.bias", define(FULL, 4)["layers.0.attention.qkv.bias"]
    numbers = np.arange(1, 11, dtype=np.float32).reshape(2, 5)  # of each head its 3 queries, key, value
    stored = np.broadcast_to(numbers[..., None], (2, 5, 16))
    expanded = Expansion.of(path, spec, FULL).apply(stored)[..., 0]
    np.testing.assert_array_equal(expanded, [[1, 2, 4, 5], [3, 0, 4, 5], [6, 7, 9, 10], [8, 0, 9, 10]])
    out = Expansion.of("layers.0.attention.out.weight", define(FULL, 4)["layers.0.attention.out.weight"], FULL)
    heads = np.broadcast_to(np.arange(1, 7, dtype=np.float32)[None, :, None], (32, 6, 16))
    np.testing.assert_array_equal(out.apply(heads)[0, :, 0], [1, 2, 3, 0, 4, 5, 6, 0])


def test_padding_is_zero():
    specs = define(FULL, 4)
    table = Expansion.of("embed.weight", specs["embed.weight"], FULL).apply(np.ones((59, 32), np.float32))
    assert table.shape == (60, 32) and table[:59].all() and not table[59:].any()
