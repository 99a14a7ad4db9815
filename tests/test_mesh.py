"""Devices by name, and where parameters lie on them."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import xla_bridge
from jax.sharding import Mesh, PartitionSpec
from many_heads import MODEL

from jaxllm.config import EngineConfig
from jaxllm.models.layers import Setting
from jaxllm.models.parameters import define_model
from jaxllm.parallel.mesh import MEMORY_FRACTIONS, TENSOR_AXIS, make_mesh, prepare_devices
from jaxllm.parallel.sharding import named_sharding, partition_spec, replicated


def mesh_of(device=None, size=1):
    return make_mesh(EngineConfig("m", device=device, tensor_parallel_size=size))


@pytest.mark.parametrize(
    ("device", "size", "first"),
    [(None, 1, 0), (None, 8, 0), ("cpu", 1, 0), ("cpu", 3, 0), ("cpu:0", 1, 0), ("cpu:7", 1, 7), ("cpu:2", 6, 2)],
)
def test_a_mesh_begins_at_the_named_device(device, size, first):
    mesh = mesh_of(device, size)
    assert mesh.axis_names == (TENSOR_AXIS,)
    assert list(mesh.devices) == jax.devices()[first : first + size]


@pytest.mark.parametrize(
    ("device", "size", "message"),
    [
        ("cuda", 1, "device='cuda' is not available: JAX sees cpu devices only.*'jaxllm.cuda13.'"),
        ("cuda:1", 1, "device='cuda:1' is not available"),
        ("gpux", 1, "device='gpux' is not available"),
        ("cpu:8", 1, "device='cpu:8' does not exist: there are 8 cpu devices"),
        ("cpu:x", 1, "device='cpu:x' is not valid: use a platform and a number, as 'cuda:0' or 'cpu'"),
        ("cpu:-1", 1, "device='cpu:-1' is not valid"),
        (None, 9, "tensor_parallel_size=9 needs 9 devices, but there are 8.*lower it, or make more devices visible"),
        ("cpu:6", 3, "tensor_parallel_size=3 needs 3 devices, but there are 2"),
    ],
)
def test_devices_that_are_not_there(device, size, message):
    with pytest.raises(ValueError, match=message):
        mesh_of(device, size)


def define(size):
    mesh = Mesh(np.array(jax.devices()[:size]), (TENSOR_AXIS,))
    return define_model(MODEL, Setting(jnp.dtype(jnp.float32), mesh, "xla"))


SHARED = {
    "embed.weight": ((60, 32), (20, 32)),
    "lm_head.weight": ((60, 32), (20, 32)),
    "layers.1.attention.qkv.weight": ((6, 5, 16, 32), (2, 5, 16, 32)),
    "layers.1.attention.out.weight": ((32, 18, 16), (32, 6, 16)),
    "layers.1.mlp.gate_up.weight": ((48, 2, 32), (16, 2, 32)),
    "layers.1.mlp.down.weight": ((32, 48), (32, 16)),
}
"""Shapes of parameters that three devices share, whole and on one device."""


def test_parameters_are_split_by_heads_intermediate_size_and_vocabulary():
    specs = define(3).specs
    for path, spec in specs.items():
        whole, part = SHARED.get(path.replace("layers.0", "layers.1"), (spec.shape, spec.shape))
        assert spec.shape == whole and spec.sharding.shard_shape(spec.shape) == part, path
    assert set(SHARED) < set(specs)


def test_a_device_holds_its_own_heads():
    """Rows of the whole parameter in the order of the devices: head 2 and 3 lie on the second one."""
    spec = define(3).specs["layers.0.attention.qkv.weight"]
    numbers = np.arange(spec.size, dtype=np.float32).reshape(spec.shape)
    placed = jax.device_put(numbers, spec.sharding)
    for rank, shard in enumerate(sorted(placed.addressable_shards, key=lambda shard: shard.device.id)):
        assert shard.device == jax.devices()[rank]
        assert np.array_equal(shard.data, numbers[2 * rank : 2 * rank + 2])


def test_the_leaves_of_a_model_are_put_back_where_they_belong():
    definition = define(1)
    params = {
        name: np.full(spec.shape, index, np.float32) for index, (name, spec) in enumerate(definition.specs.items())
    }
    model = definition.merge(definition.leaves(dict(reversed(params.items()))))
    order = list(definition.specs)
    assert (model.layers[1].mlp.down.weight[...] == order.index("layers.1.mlp.down.weight")).all()
    assert (model.final_norm.scale[...] == order.index("final_norm.scale")).all()


def test_axes_have_a_rule_each():
    assert partition_spec(("tokens", "heads", "head_dim")) == PartitionSpec(None, TENSOR_AXIS, None)
    with pytest.raises(KeyError, match="unheard_of"):
        partition_spec(("unheard_of",))
    mesh = mesh_of(size=2)
    assert replicated(mesh).is_fully_replicated
    assert not named_sharding(mesh, ("vocab",)).is_fully_replicated


@pytest.fixture
def before_jax_starts(monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    for name in MEMORY_FRACTIONS:
        monkeypatch.delenv(name, raising=False)


def test_memory_is_reserved_before_jax_starts(before_jax_starts, monkeypatch):
    prepare_devices(EngineConfig("m", gpu_memory_utilization=0.5))
    assert os.environ.pop(MEMORY_FRACTIONS[0]) == "0.5"


def test_what_the_user_set_is_left_alone(before_jax_starts, monkeypatch):
    monkeypatch.setenv(MEMORY_FRACTIONS[1], "0.3")
    prepare_devices(EngineConfig("m", gpu_memory_utilization=0.5))
    assert MEMORY_FRACTIONS[0] not in os.environ and os.environ[MEMORY_FRACTIONS[1]] == "0.3"


def test_an_engine_on_a_cpu_takes_no_gpu(before_jax_starts):
    prepare_devices(EngineConfig("m", device="cpu"))
    assert jax.config.jax_platforms == "cpu" and MEMORY_FRACTIONS[0] not in os.environ


def test_memory_that_is_reserved_too_late_is_an_error(monkeypatch):
    prepare_devices(EngineConfig("m", gpu_memory_utilization=0.5))  # JAX runs on a CPU: there is nothing to do
    monkeypatch.setenv(MEMORY_FRACTIONS[0], "0.90")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    prepare_devices(EngineConfig("m", gpu_memory_utilization=0.9))
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.5 comes too late"):
        prepare_devices(EngineConfig("m", gpu_memory_utilization=0.5))
    prepare_devices(EngineConfig("m", gpu_memory_utilization=0.5, device="cpu"))
