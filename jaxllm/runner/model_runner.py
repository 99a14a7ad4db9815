"""Turns plans into device work: owns the parameters, the cache, the state and the compiled steps.

`launch` returns at once; `PendingStep.result` is the only blocking read. Steps run on the device in the
order of their launches, which is what makes run-ahead and the reuse of freed blocks sound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
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
from jaxllm.kernels.backend import Backend
from jaxllm.memory import DeviceMemory, MemoryBudget
from jaxllm.models.layers import Setting
from jaxllm.models.parameters import define_model
from jaxllm.parallel.sharding import replicated
from jaxllm.runner.buckets import Bucket, make_ladder
from jaxllm.runner.compile_counter import num_compilations
from jaxllm.runner.device_memory import check_room, memory_limit, remember, report, shard_bytes, temp_bytes
from jaxllm.runner.device_state import state_specs
from jaxllm.runner.executable_store import ExecutableStore, enable_compilation_cache, may_store
from jaxllm.runner.executables import Executables, Signature
from jaxllm.runner.kv_cache import CachePlan, allocate, cache_specs
from jaxllm.runner.preparation import Preparation
from jaxllm.runner.step import run_steps
from jaxllm.runner.step_counts import StepCounts
from jaxllm.runner.step_input import StepLayout, most_admitted_blocks
from jaxllm.scheduling.plan import StepOutput, StepPlan

logger = logging.getLogger(__name__)

type ParamSpecs = Mapping[str, jax.ShapeDtypeStruct]
EAGER_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": ""}}
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
GRAPH_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": GRAPHS}}
"""XLA's own choice, and loops: several steps are one CUDA graph."""
GPU_STEPS = 4
"""Most steps of a call on a GPU, by default: a host that is four times too slow still keeps up."""
PROBED_LAYERS = 8
"""Layers use each other's temporaries: those of a few are those of all."""


@dataclass(frozen=True)
class PendingStep:
    """A launched step whose result is on its way to the host."""

    output: Any
    """Array [steps, 2, rows]."""
    num_rows: int
    num_steps: int = 1

    @property
    def is_ready(self) -> bool:
        """The device is done with it."""
        return self.output.is_ready()

    def result(self) -> StepOutput:
        """Waits for the step; token ids and log-probabilities by row."""
        taken = np.asarray(self.output)[: self.num_steps, :, : self.num_rows]
        token_ids, bits = np.ascontiguousarray(taken.transpose(1, 2, 0))
        return StepOutput(token_ids.tolist(), bits.view(np.float32).tolist())


class ModelRunner:
    """One model on one mesh.

    Args:
        config: the user's choices, with every default resolved; `self.config` also has a number for
            max_model_len="auto".
        model: facts of the checkpoint.
        mesh: where it runs.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Mesh):
        self.mesh, self.dtype = mesh, jnp.dtype(config.dtype)
        self.platform = mesh.devices.flat[0].platform
        if config.compilation_cache:
            enable_compilation_cache(self.platform)
        self.size = self._fit(config, model)
        self.executables = self._executables()
        self.layouts = {bucket: self._layout(bucket) for bucket in self.ladder.all}
        _, cache, state, _ = self._arguments(self.ladder.all[0], self.size)
        self.preparation = Preparation(cache, state, self.executables.store)
        self.compiled_at_ready = 0
        self.counts = StepCounts()

    def start(self, load: Callable[[ParamSpecs], Mapping[str, jax.Array]], progress: bool = True) -> None:
        """Compiles every bucket while `load` brings the parameters; then nothing compiles any more.

        Raises:
            ValueError: the devices do not have the memory.
        """
        weight_bytes, cache_bytes, state_bytes = self._held_bytes(self.size)
        check_room(self._devices, cache_bytes, weight_bytes + state_bytes + self.temp)
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
        num_tokens, num_steps = plan.num_tokens, plan.num_steps
        bucket = self.ladder.select(num_tokens, len(plan.rows), admits)
        step = self.executables.get(bucket)
        packed = self.layouts[bucket].pack(plan)
        if admits:
            self.cache, self.state = self.preparation.run(plan, self.cache, self.state)
        self.cache, self.state, output = step(self.params, self.cache, self.state, packed)
        output.copy_to_host_async()
        self.counts.add(num_steps, sum(row.num_tokens * row.num_steps for row in plan.rows), bucket.tokens * num_steps)
        return PendingStep(output, len(plan.rows), num_steps)

    def memory_report(self) -> tuple[DeviceMemory, ...]:
        """What the engine holds on every device."""
        temp = temp_bytes(self.executables.compiled.values())
        return tuple(report(device, self.params, self.cache, self.state, temp) for device in self.mesh.devices.flat)

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
            self.preparation.compile()

    def _define(self, config: EngineConfig, model: ModelConfig) -> None:
        """Sets what follows from the configuration and the model alone."""
        max_model_len, block_size = config.max_model_len, config.block_size
        assert isinstance(max_model_len, int) and isinstance(block_size, int), "unresolved defaults"
        assert config.max_num_seqs and config.max_num_batched_tokens, "unresolved defaults"
        self.config, self.model = config, model.for_context(max_model_len)
        fastest: Backend = "xla" if self.platform == "cpu" else "pallas"
        backend = fastest if config.attention_backend == "auto" else config.attention_backend
        self.definition = define_model(self.model, Setting(self.dtype, self.mesh, backend))
        self.ladder = make_ladder(config.max_num_seqs, config.max_num_batched_tokens, self.platform)
        self.block_size = block_size
        # Not more than a block has tokens: a row then begins one new block in a call at the most.
        default_steps = 1 if self.platform == "cpu" else GPU_STEPS
        self.max_steps = min(config.num_scheduler_steps or default_steps, block_size)
        self.max_blocks = -(-max_model_len // block_size)

    def _fit(self, config: EngineConfig, model: ModelConfig) -> CacheSize:
        """Decides how large the cache is and, where the user left it open, how long a request may be."""
        is_auto = config.max_model_len == "auto"
        longest = model.max_position_embeddings if is_auto else config.max_model_len
        self._define(dataclasses.replace(config, max_model_len=longest), model)
        budget = self._budget()
        if is_auto:
            longest = CachePlan(self.config, self.model, self.dtype.itemsize, budget).longest_context()
            logger.info("max_model_len='auto' is %d", longest)
            self._define(dataclasses.replace(config, max_model_len=longest), model)
        self.temp = budget.temp if budget else 0
        return CachePlan(self.config, self.model, self.dtype.itemsize, budget).size()

    def _budget(self) -> MemoryBudget | None:
        """Memory of one device; None where nothing has to be measured or nobody says how much there is."""
        named = self.config.num_gpu_blocks_override or self.config.kv_cache_memory_bytes
        limit = None if named else memory_limit(self._devices)
        if limit is None:
            return None
        probed = CacheSize(self.max_blocks + 1, self.block_size)
        weights, _, state = self._held_bytes(probed)
        facts = (self.model, probed, self.dtype, self.ladder, self.config.attention_backend, "temporaries")
        file = ExecutableStore(self._devices, facts).folder / "temp" if self.config.compilation_cache else None
        return MemoryBudget(limit, weights, state, remember(file, partial(self._measure_temp, probed)))

    def _measure_temp(self, size: CacheSize) -> int:
        """Bytes of temporaries of the largest step, found by compiling it for a model of few layers."""
        num_layers = min(self.model.num_layers, PROBED_LAYERS)
        model = dataclasses.replace(self.model, num_layers=num_layers, layers=self.model.layers[:num_layers])
        config = dataclasses.replace(self.config, num_gpu_blocks_override=size.num_blocks)
        return temp_bytes([ModelRunner(config, model, self.mesh)._lower(self.ladder.mixed[-1], size).compile()])

    def _held_bytes(self, size: CacheSize) -> tuple[int, int, int]:
        """Bytes of weights, cache and state on one device."""
        weights, cache, state, _ = self._arguments(self.ladder.all[0], size)
        return shard_bytes(weights), shard_bytes(jax.tree.leaves(cache)), shard_bytes(jax.tree.leaves(state))

    @property
    def _devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    def _executables(self) -> Executables:
        config = self.config
        store = None
        if config.compilation_cache and not config.enforce_eager and may_store(self.platform):
            shape = (self.size, self.dtype, self.ladder, self.max_blocks, self.max_steps)
            facts = (self.model, *shape, config.attention_backend)
            store = ExecutableStore(self._devices, facts)
        options = (EAGER_OPTIONS if config.enforce_eager else GRAPH_OPTIONS).get(self.platform, {})
        return Executables(partial(self._lower, size=self.size), self._signature, store, options)

    def _layout(self, bucket: Bucket) -> StepLayout:
        assert self.config.max_num_seqs
        return StepLayout(bucket, self.admitted_blocks, self.config.max_num_seqs, self.model.vocab_size)

    @property
    def admitted_blocks(self) -> int:
        """Most blocks of requests that take their seats in one step."""
        assert self.config.max_num_seqs
        return most_admitted_blocks(self.max_blocks, self.config.max_num_seqs)

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
        return arguments, (cache, state, packed)  # of the outputs only the structure matters

    def _lower(self, bucket: Bucket, size: CacheSize) -> jax.stages.Lowered:
        layout = self._layout(bucket)
        arguments = self._arguments(bucket, size)

        def step(leaves, cache, state, packed):
            max_steps = 1 if bucket.admits else self.max_steps
            return run_steps(self.definition.merge(leaves), cache, state, layout.unpack(packed), max_steps)

        step.__name__ = bucket.name.replace("-", "_")
        shardings = jax.tree.map(lambda spec: spec.sharding, (*arguments[1:3], arguments[3]))
        precise = jax.default_matmul_precision("highest") if self.dtype == jnp.float32 else contextlib.nullcontext()
        with precise:
            return jax.jit(step, donate_argnums=(1, 2), out_shardings=shardings).lower(*arguments)
