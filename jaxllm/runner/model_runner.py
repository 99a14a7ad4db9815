"""Turns plans into device work: owns the parameters, the cache, the state and the compiled steps.

`launch` returns at once; `PendingStep.result` is the only blocking read. Steps run on the device in the
order of their launches, which is what makes run-ahead and the reuse of freed blocks sound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import CacheSize, EngineConfig, ModelConfig
from jaxllm.kernels.ragged_paged_attention import Backend
from jaxllm.models.layers import Setting
from jaxllm.models.parameters import define_model
from jaxllm.parallel.sharding import replicated
from jaxllm.runner.buckets import Bucket, make_ladder
from jaxllm.runner.compile_counter import num_compilations
from jaxllm.runner.device_state import state_specs
from jaxllm.runner.executable_store import ExecutableStore, enable_compilation_cache, may_store
from jaxllm.runner.executables import Executables, Signature
from jaxllm.runner.kv_cache import CPU_CACHE_BYTES, allocate, cache_size, cache_specs
from jaxllm.runner.step import run_step
from jaxllm.runner.step_input import StepLayout
from jaxllm.scheduling.plan import StepOutput, StepPlan

type ParamSpecs = Mapping[str, jax.ShapeDtypeStruct]
TEMP_ROUNDING = 256 << 20
EAGER_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": ""}}


@dataclass(frozen=True)
class PendingStep:
    """A launched step whose result is on its way to the host."""

    output: jax.Array
    num_rows: int

    def result(self) -> StepOutput:
        """Waits for the step; token ids and log-probabilities by row."""
        token_ids, bits = np.asarray(self.output)[:, : self.num_rows]
        return StepOutput(token_ids.tolist(), bits.view(np.float32).tolist())


class ModelRunner:
    """One model on one mesh.

    Args:
        config: the user's choices, with every default resolved.
        model: facts of the checkpoint.
        mesh: where it runs.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Mesh):
        assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens, "unresolved defaults"
        model = model.for_context(config.max_model_len)
        self.config, self.model, self.mesh = config, model, mesh
        self.dtype = jnp.dtype(config.dtype)
        self.platform = mesh.devices.flat[0].platform
        fastest: Backend = "xla" if self.platform == "cpu" else "pallas"
        backend = fastest if config.attention_backend == "auto" else config.attention_backend
        self.definition = define_model(model, Setting(self.dtype, mesh, backend))
        self.ladder = make_ladder(config.max_num_seqs, config.max_num_batched_tokens, self.platform)
        self.max_blocks = -(-config.max_model_len // config.block_size)
        if config.compilation_cache:
            enable_compilation_cache(self.platform)
        self.size = self._measure_cache()
        self.executables = self._executables()
        self.layouts = {bucket: self._layout(bucket) for bucket in self.ladder.all}
        self.compiled_at_ready = 0

    def start(self, load: Callable[[ParamSpecs], Mapping[str, jax.Array]], progress: bool = True) -> None:
        """Compiles every bucket while `load` brings the parameters; then nothing compiles any more."""
        _, cache, state, _ = self._arguments(self.ladder.all[0], self.size)
        with ThreadPoolExecutor(max_workers=2) as pool:
            compiling = pool.submit(self._compile_all, progress)
            allocating = pool.submit(self._allocate, (cache, state), compiling)
            try:
                self.params = self.definition.leaves(load(self.definition.specs))
                compiling.result()
                self.cache, self.state = allocating.result()
            except BaseException:
                self.executables.cancel()
                raise
        jax.block_until_ready((self.params, self.cache, self.state))
        self.compiled_at_ready = num_compilations()

    @property
    def num_compiles_since_ready(self) -> int:
        return num_compilations() - self.compiled_at_ready

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step on the device."""
        admits = any(row.admitted for row in plan.rows)
        bucket = self.ladder.select(plan.num_tokens, len(plan.rows), admits)
        step = self.executables.get(bucket)
        packed = self.layouts[bucket].pack(plan)
        self.cache, self.state, output = step(self.params, self.cache, self.state, packed)
        output.copy_to_host_async()
        return PendingStep(output, len(plan.rows))

    def close(self) -> None:
        """Frees the device memory of parameters, cache and state."""
        for array in jax.tree.leaves((self.params, self.cache, self.state)):
            if not array.is_deleted():
                array.delete()
        self.executables.compiled.clear()

    def _allocate(self, specs: Any, compiling: Future[None]) -> Any:
        if self.platform != "cpu":
            compiling.result()  # until then autotuning needs the memory
        return allocate(specs)

    def _compile_all(self, progress: bool) -> None:
        if not self.config.enforce_eager:
            self.executables.compile_all(self.ladder.all, progress)

    def _measure_cache(self) -> CacheSize:
        config = self.config
        assert config.max_model_len and config.max_num_seqs
        longest = (config.max_model_len, config.max_num_seqs)
        measured = config.num_gpu_blocks_override or config.kv_cache_memory_bytes
        available = 0 if measured else self._available_bytes()
        return cache_size(config, self.model, self.dtype.itemsize, available, longest)

    def _available_bytes(self) -> int:
        """Bytes per device that weights and the largest step's temporaries leave."""
        stats = self.mesh.devices.flat[0].memory_stats()
        if stats is None:
            return CPU_CACHE_BYTES
        weights = sum(_shard_bytes(spec) for spec in self.definition.specs.values())
        probe = self._lower(self.ladder.mixed[-1], CacheSize(self.max_blocks + 1, self.config.block_size))
        analysis = probe.compile().memory_analysis()
        temp = analysis.temp_size_in_bytes if analysis else 0
        return stats["bytes_limit"] - stats["bytes_in_use"] - weights - (temp // TEMP_ROUNDING + 2) * TEMP_ROUNDING

    def _executables(self) -> Executables:
        config = self.config
        store = None
        if config.compilation_cache and not config.enforce_eager and may_store(self.platform):
            facts = (self.model, self.size, self.dtype, self.ladder, self.max_blocks, config.attention_backend)
            store = ExecutableStore(list(self.mesh.devices.flat), facts)
        options = EAGER_OPTIONS.get(self.platform, {}) if config.enforce_eager else {}
        return Executables(partial(self._lower, size=self.size), self._signature, store, options)

    def _layout(self, bucket: Bucket) -> StepLayout:
        assert self.config.max_num_seqs
        return StepLayout(bucket, self.config.block_size, self.config.max_num_seqs, self.model.vocab_size)

    def _arguments(self, bucket: Bucket, size: CacheSize) -> tuple[Any, Any, Any, Any]:
        """Specs of a step's arguments: parameters, cache, state, packed input."""
        assert self.config.max_num_seqs
        cache = cache_specs(size, self.model, self.dtype, self.mesh)
        state = state_specs(self.config.max_num_seqs, self.max_blocks, self.model.vocab_size, self.mesh)
        packed = jax.ShapeDtypeStruct((self._layout(bucket).size,), jnp.int32, sharding=replicated(self.mesh))
        return tuple(self.definition.specs.values()), cache, state, packed

    def _signature(self, bucket: Bucket) -> Signature:
        arguments = self._arguments(bucket, self.size)
        _, cache, state, packed = arguments
        return arguments, (cache, state, packed)

    def _lower(self, bucket: Bucket, size: CacheSize) -> jax.stages.Lowered:
        layout = self._layout(bucket)
        arguments = self._arguments(bucket, size)

        def step(leaves, cache, state, packed):
            return run_step(self.definition.merge(leaves), cache, state, layout.unpack(packed))

        step.__name__ = bucket.name.replace("-", "_")
        shardings = jax.tree.map(lambda spec: spec.sharding, (*arguments[1:3], arguments[3]))
        precise = jax.default_matmul_precision("highest") if self.dtype == jnp.float32 else contextlib.nullcontext()
        with precise:
            return jax.jit(step, donate_argnums=(1, 2), out_shardings=shardings).lower(*arguments)


def _shard_bytes(spec: jax.ShapeDtypeStruct) -> int:
    assert spec.sharding is not None, "parameters have a place"
    shape = spec.sharding.shard_shape(spec.shape)
    return int(np.prod(shape)) * spec.dtype.itemsize
