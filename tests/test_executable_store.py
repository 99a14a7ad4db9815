"""Executables on disk, and the compiled steps that come from there or from the compiler."""

from __future__ import annotations

import importlib.metadata
import logging
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.runner import executable_store
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compile_counter import num_compilations
from jaxllm.runner.executable_store import ExecutableStore, enable_compilation_cache
from jaxllm.runner.executables import Executables

SMALL, LARGE = Bucket(2, 2, admits=False), Bucket(8, 4, admits=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_store(*facts):
    return ExecutableStore(jax.devices()[:1], facts)


def double(numbers):
    return {"doubled": 2 * numbers, "sum": jnp.sum(numbers)}


class Steps:
    """Executables of `double` for vectors of a bucket's size; counts what was lowered."""

    def __init__(self, store, options=None):
        self.lowered = []
        self.executables = Executables(self.lower, self.signature, store, options or {})

    def lower(self, bucket):
        self.lowered.append(bucket)
        # Another function each time: JAX remembers what it compiled of the same one.
        return jax.jit(lambda numbers: double(numbers)).lower(self.spec(bucket))

    def spec(self, bucket):
        return jax.ShapeDtypeStruct((bucket.tokens,), jnp.float32)

    def signature(self, bucket):
        return (self.spec(bucket),), jax.eval_shape(double, self.spec(bucket))

    def check(self, bucket):
        numbers = np.arange(bucket.tokens, dtype=np.float32)
        result = jax.device_get(self.executables.get(bucket)(numbers))
        assert np.array_equal(result["doubled"], 2 * numbers) and result["sum"] == numbers.sum()


def test_what_was_stored_is_neither_lowered_nor_compiled_again():
    first, second = Steps(make_store()), Steps(make_store())
    first.executables.compile_all([LARGE, SMALL], progress=False)
    before = num_compilations()
    second.executables.compile_all([LARGE, SMALL], progress=False)
    for bucket in (SMALL, LARGE):
        first.check(bucket)
        second.check(bucket)
    assert set(first.lowered) == {SMALL, LARGE} and second.lowered == []
    assert num_compilations() == before


def test_an_executable_over_several_devices_keeps_its_shardings():
    devices = jax.devices()[:3]
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    spec = jax.ShapeDtypeStruct((6, 2), jnp.float32, sharding=sharding)
    compiled = jax.jit(lambda x: x - x.sum(), donate_argnums=0, out_shardings=sharding).lower(spec).compile()
    store = ExecutableStore(devices, [])
    store.save("step", compiled)
    loaded = store.load("step", (spec,), spec)
    numbers = np.arange(12, dtype=np.float32).reshape(6, 2)
    result = loaded(jax.device_put(numbers, sharding))
    assert np.array_equal(result, numbers - 66)
    assert result.sharding.is_equivalent_to(sharding, 2)
    donated = jax.device_put(numbers, sharding)
    loaded(donated)
    assert donated.is_deleted()


def test_nothing_is_there_at_first():
    assert make_store().load("step", (), ()) is None


DAMAGES = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "cut off early": lambda data: data[:10],
    "another file": lambda data: b"not an executable" * 10,
    "a changed bit at the end": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a changed bit at the start": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a changed bit in the middle": lambda data: data[:1000] + bytes([data[1000] ^ 16]) + data[1001:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_made_again(damage, caplog):
    """With a warning. XLA itself aborts the process over some changed bits."""
    Steps(make_store()).executables.get(SMALL)
    path = make_store().folder / SMALL.name
    path.write_bytes(damage(path.read_bytes()))
    steps = Steps(make_store())
    with caplog.at_level(logging.WARNING):
        steps.check(SMALL)
    assert f"stored executable {path} is unreadable, compiling it again" in caplog.text
    assert steps.lowered == [SMALL]
    again = Steps(make_store())
    again.check(SMALL)
    assert again.lowered == []


def test_other_facts_have_another_folder():
    folders = {make_store(*facts).folder for facts in [(), (1,), ("1",), (1, 2), (12,), (2, 1)]}
    assert len(folders) == 6
    assert make_store(1, "a").folder == make_store(1, "a").folder


def test_another_version_device_or_flag_has_another_folder(monkeypatch):
    folder = make_store().folder
    assert ExecutableStore(jax.devices()[1:2], ()).folder != folder
    assert ExecutableStore(jax.devices()[:2], ()).folder != folder
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert make_store().folder != folder
    version = importlib.metadata.version
    for name in ("jax", "jaxlib", "flax"):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.metadata, "version", lambda asked, name=name: version(asked) + "1" * (asked == name)
            )
            assert make_store().folder != folder
    with monkeypatch.context() as patch:
        patch.setattr(executable_store, "_processor", lambda: "another")
        assert make_store().folder != folder
    assert make_store().folder == folder


@pytest.mark.parametrize("changed", ["config.py", "kernels/linear.py", "models/rope.py", "runner/step.py"])
def test_another_source_of_a_step_has_another_hash(changed, tmp_path, monkeypatch):
    package = tmp_path / "jaxllm"
    for name in ("config.py", "kernels/linear.py", "models/rope.py", "runner/step.py", "engine/engine.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("pass\n")
    monkeypatch.setattr(executable_store, "__file__", str(package / "runner/executable_store.py"))
    before = executable_store._source_hash()
    (package / "engine/engine.py").write_text("pass  # no part of a step\n")
    assert executable_store._source_hash() == before
    (package / changed).write_text("pass  # changed\n")
    assert executable_store._source_hash() != before


def test_another_hash_of_sources_has_another_folder(monkeypatch):
    folder = make_store().folder
    monkeypatch.setattr(executable_store, "SOURCE_HASH", "another")
    assert make_store().folder != folder


def test_a_cache_that_cannot_be_written_costs_a_warning_and_nothing_else(cache, caplog):
    cache.write_text("a file, not a folder")
    steps = Steps(make_store())
    with caplog.at_level(logging.WARNING):
        steps.check(SMALL)
    assert f"cannot store the executable {SMALL.name}" in caplog.text


def test_a_write_that_fails_leaves_nothing_behind(monkeypatch, caplog):
    store = make_store()

    def fail(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(executable_store.os, "replace", fail)
        Steps(store).check(SMALL)
    assert "no space left on device" in caplog.text
    assert list(store.folder.iterdir()) == []


def test_files_are_private():
    """Loading an executable runs it."""
    store = make_store()
    Steps(store).executables.get(SMALL)
    assert [path.name for path in store.folder.iterdir()] == [SMALL.name]
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((store.folder / SMALL.name).stat().st_mode) == 0o600


def test_without_a_store_a_bucket_is_compiled_when_it_is_first_met(cache):
    steps = Steps(store=None)
    assert steps.lowered == []
    for _ in range(2):
        steps.check(LARGE)
    assert steps.lowered == [LARGE]
    steps.check(SMALL)
    assert steps.lowered == [LARGE, SMALL]
    assert not cache.exists()


def test_nothing_compiles_once_all_are_there():
    steps = Steps(store=None)
    before = num_compilations()
    steps.executables.compile_all([LARGE, SMALL], progress=False)
    assert num_compilations() == before + 2
    for bucket in (SMALL, LARGE, SMALL):
        steps.check(bucket)
    assert num_compilations() == before + 2 and len(steps.lowered) == 2


def test_a_step_of_another_shape_is_an_error_and_does_not_compile():
    steps = Steps(store=None)
    steps.executables.compile_all([SMALL], progress=False)
    before = num_compilations()
    with pytest.raises(TypeError, match=r"compiled with .* and called with"):
        steps.executables.get(SMALL)(np.zeros(3, np.float32))
    assert num_compilations() == before


def test_compiler_options_reach_the_compiler():
    steps = Steps(store=None, options={"no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        steps.executables.get(SMALL)


def test_a_failed_compilation_is_raised():
    steps = Steps(store=None)
    steps.executables.lower = lambda bucket: {}[bucket]
    with pytest.raises(KeyError):
        steps.executables.compile_all([LARGE, SMALL], progress=False)


@pytest.fixture
def compilation_cache():
    """Puts JAX's settings back."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_cache_of_jax_is_on_except_on_a_cpu(compilation_cache, cache):
    enable_compilation_cache("cpu")
    assert jax.config.jax_compilation_cache_dir is None
    enable_compilation_cache("gpu")
    assert jax.config.jax_compilation_cache_dir == str(cache / "xla")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_a_cache_of_jax_that_the_user_chose_stays(compilation_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    enable_compilation_cache("gpu")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
