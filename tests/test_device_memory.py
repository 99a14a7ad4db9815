"""The budget from what devices say, the check that it is there, and max_model_len="auto" on the tiny model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_model import write_model

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.parallel.sharding import named_sharding, replicated
from jaxllm.runner import device_memory, fitting
from jaxllm.runner.device_memory import PREALLOCATE, check_room, held_bytes, memory_limit, remember, shard_bytes
from jaxllm.runner.fitting import fit
from jaxllm.runner.programs import Programs

GIB = 1 << 30
MODEL = ModelConfig("llama", 64, 48, 2, 6, 3, 16, 48, max_position_embeddings=640)
BLOCK_BYTES = 2 * 2 * 3 * 16 * 4 * 16


class FakeDevice:
    """A GPU of 100 GiB of which 90 are granted."""

    def __init__(self, in_use=0, pool_bytes=90 * GIB, bytes_limit=90 * GIB):
        self.stats = {"bytes_in_use": in_use, "pool_bytes": pool_bytes, "bytes_limit": bytes_limit}

    def memory_stats(self):
        return self.stats

    def __str__(self):
        return "cuda:0"


@pytest.fixture(autouse=True)
def first_allocation(monkeypatch):
    """Nothing can be put on a fake device."""
    monkeypatch.setattr(device_memory.jax, "device_put", lambda array, device: jnp.asarray(array))
    monkeypatch.delenv(PREALLOCATE, raising=False)


def test_the_limit_is_the_smallest_and_a_cpu_has_none():
    assert memory_limit([FakeDevice(), FakeDevice(in_use=GIB, bytes_limit=80 * GIB)]) == 80 * GIB
    assert memory_limit(jax.devices()) is None


def test_room_for_everything():
    check_room([FakeDevice(), FakeDevice(in_use=10 * GIB)], cache=60 * GIB, rest=20 * GIB)
    check_room(jax.devices(), cache=1 << 60, rest=0)


def test_memory_that_this_process_holds():
    with pytest.raises(ValueError) as raised:
        check_room([FakeDevice(), FakeDevice(in_use=11 * GIB)], cache=60 * GIB, rest=20 * GIB)
    assert str(raised.value) == (
        "gpu_memory_utilization grants 90.0 GiB of cuda:0, and the engine needs 80.0 GiB (60.0 GiB of K/V cache), but "
        "this process holds 11.0 GiB there already: close other engines and drop arrays, "
        f"or set kv_cache_memory_bytes to at most {59 * GIB}"
    )
    check_room([FakeDevice(in_use=11 * GIB)], cache=59 * GIB, rest=20 * GIB)


def test_memory_that_other_processes_hold(monkeypatch):
    taken = [FakeDevice(pool_bytes=15 * GIB)]
    with pytest.raises(ValueError, match=r"other processes left only 15.0 GiB \(nvidia-smi lists them\): end them$"):
        check_room(taken, cache=60 * GIB, rest=20 * GIB)
    check_room(taken, cache=5 * GIB, rest=10 * GIB)
    monkeypatch.setenv(PREALLOCATE, "false")  # memory is taken as it is needed: nobody knows whether there will be any
    check_room(taken, cache=60 * GIB, rest=20 * GIB)


def test_a_measurement_is_kept(tmp_path):
    file = tmp_path / "new" / "temp"
    assert remember(file, lambda: 17) == 17
    assert remember(file, lambda: 18) == 17
    file.write_text("damaged")
    assert remember(file, lambda: 19) == 19
    assert remember(file, lambda: 20) == 19
    assert remember(None, lambda: 21) == 21


def test_a_measurement_that_cannot_be_kept_is_a_warning(tmp_path, caplog):
    (tmp_path / "folder").write_text("a file")
    assert remember(tmp_path / "folder" / "temp", lambda: 17) == 17
    assert "cannot keep a measurement" in caplog.text


def test_bytes_of_shards_are_those_that_arrays_take():
    mesh = Mesh(np.array(jax.devices()[:3]), (TENSOR_AXIS,))
    split = jnp.zeros((2, 6), jnp.bfloat16, device=named_sharding(mesh, ("block_size", "kv_heads")))
    whole = jnp.zeros(5, jnp.int32, device=replicated(mesh))
    assert shard_bytes([split, whole]) == 2 * 2 * 2 + 5 * 4
    assert [held_bytes([split, whole], device) for device in jax.devices()[:4]] == [28, 28, 28, 0]
    whole.delete()
    assert held_bytes([split, whole], jax.devices()[0]) == 8


def test_a_step_that_another_thread_launches_is_in_nobodys_way():
    """It deletes arrays between any two looks at them: their shards are gone then, and asking for those fails."""

    class Deleted:
        """A moment later."""

        def __init__(self, array):
            self.shape, self.dtype, self.sharding = array.shape, array.dtype, array.sharding

        def is_deleted(self):
            return False

    assert held_bytes([Deleted(jnp.zeros(5, jnp.int16))], jax.devices()[0]) == 10


def fit_tiny(**fields):
    config = EngineConfig("m", dtype="float32", max_num_seqs=4, max_num_batched_tokens=16, **fields)
    mesh = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
    return fit(config.resolve(MODEL, "cpu"), MODEL, mesh)


@pytest.fixture
def grant(monkeypatch, tmp_path):
    """A function that sets how many bytes every device grants."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    return lambda limit: monkeypatch.setattr(fitting, "memory_limit", lambda devices: limit)


def test_the_same_start_has_the_same_shapes_and_measures_once(grant, monkeypatch):
    grant(GIB)
    lowered, lower = [], Programs.lower_step
    monkeypatch.setattr(Programs, "lower_step", lambda *args: lowered.append(args[1]) or lower(*args))
    first = fit_tiny()
    assert lowered == [first.programs.ladder.mixed[-1]], "the largest step is measured"
    assert first.budget.temp > 0
    assert first.size.num_blocks == 4 * 640 // 16 + 1, "there is room for every request"
    assert fit_tiny().size == first.size and len(lowered) == 1
    fit_tiny(kv_cache_memory_bytes=1 << 20, compilation_cache=False)
    assert len(lowered) == 1, "what the user names need not be measured"


def test_auto_max_model_len_takes_what_weights_and_temporaries_leave(grant, monkeypatch):
    monkeypatch.setattr(fitting, "remember", lambda file, measure: 300 << 20)
    grant(2 * GIB)
    first = fit_tiny(max_model_len="auto")
    assert first.programs.config.max_model_len == 640 and first.programs.max_blocks == 40
    taken = 2 * GIB - first.budget.for_cache
    grant(taken + 21 * BLOCK_BYTES - 1)
    small = fit_tiny(max_model_len="auto")
    assert (small.programs.config.max_model_len, small.programs.max_blocks, small.size.num_blocks) == (19 * 16, 19, 20)
    grant(taken + BLOCK_BYTES)
    with pytest.raises(ValueError, match=r"max_model_len='auto' finds no length that fits.* 12.0 KiB are missing"):
        fit_tiny(max_model_len="auto")
    with pytest.raises(
        ValueError, match=r"max_model_len=640 needs 41 K/V cache blocks .* lower max_num_batched_tokens"
    ):
        fit_tiny()


def test_auto_on_a_cpu_from_end_to_end(tmp_path):
    folder = write_model(tmp_path / "tiny")
    options = {"max_model_len": "auto", "block_size": "auto", "enforce_eager": True, "compilation_cache": False}
    with LLM(str(folder), max_num_seqs=2, num_gpu_blocks_override=4, **options) as llm:
        assert (llm.engine.config.max_model_len, llm.engine.config.block_size) == (48, 16)
        [output] = llm.generate([[1] * 40], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 8
        with pytest.raises(ValueError, match="max_model_len=48 holds prompt and answer together"):
            llm.generate([[1] * 48])
