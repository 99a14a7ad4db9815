"""Turns plans into device work: owns the parameters, the cache, the state and the compiled steps.

`launch` returns at once; `PendingStep.result` is the only blocking read. Steps run on the device in the
order of their launches, which is what makes run-ahead and the reuse of freed blocks sound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import CacheSize, EngineConfig, ModelConfig
from jaxllm.kernels.backend import Backend
from jaxllm.memory import DeviceMemory, MemoryBudget, SwapCosts
from jaxllm.models.layers import Setting
from jaxllm.models.parameters import define_model
from jaxllm.parallel.all_reduce import with_all_reduce
from jaxllm.parallel.sharding import replicated
from jaxllm.runner.annotations import annotate, annotate_launch
from jaxllm.runner.buckets import Bucket, make_ladder
from jaxllm.runner.compile_counter import num_compilations
from jaxllm.runner.device_memory import check_room, memory_limit, remember, report, shard_bytes, temp_bytes
from jaxllm.runner.device_state import state_specs
from jaxllm.runner.distributions import DistributionShape, PendingDistributions, may_be_wanted
from jaxllm.runner.executable_store import ExecutableStore, enable_compilation_cache, may_store
from jaxllm.runner.executables import Executables, Signature
from jaxllm.runner.host_memory import HostMemory, staged_chunks
from jaxllm.runner.kv_cache import CachePlan, allocate, cache_specs
from jaxllm.runner.logits_processors import load_processors
from jaxllm.runner.logprob_seats import AnswerPlace, LogprobSeats, PromptPart
from jaxllm.runner.preparation import Preparation
from jaxllm.runner.prompt_scoring import PendingScores, ScoringShape, launch_scoring
from jaxllm.runner.sampler import sample
from jaxllm.runner.step import StepResult, run_steps
from jaxllm.runner.step_counts import StepCounts
from jaxllm.runner.step_input import StepLayout, most_admitted_blocks
from jaxllm.runner.token_details import unpack_details
from jaxllm.sampling_params import is_wide
from jaxllm.scheduling.plan import StepOutput, StepPlan

logger = logging.getLogger(__name__)

type ParamSpecs = Mapping[str, jax.ShapeDtypeStruct]
EAGER_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": ""}}
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
GRAPH_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": GRAPHS}}
"""XLA's own choice, and loops: several steps are one CUDA graph."""
GPU_STEPS = 4
"""Most steps of a call on a GPU, by default: a host that is four times too slow still keeps up. Not with NCCL, whose
sums cannot be captured in a loop: a loop that is no graph waits for the host after every step."""
TIMED_TOKENS = 1024
"""About so many are computed to find out how long a token takes."""
PROBED_LAYERS = 8
"""Layers use each other's temporaries: those of a few are those of all."""


@dataclass(frozen=True)
class PendingStep:
    """A launched step whose result is on its way to the host."""

    output: Any
    """Array [steps, 2, rows]."""
    num_rows: int
    num_steps: int = 1
    details: jax.Array | None = None
    wanted: Mapping[int, int] = field(default_factory=dict)
    """Rows whose details are wanted, and of how many of the most likely tokens."""
    scores: Sequence[PendingScores | PendingDistributions] = ()

    @property
    def is_ready(self) -> bool:
        """The device is done with it."""
        return self.output.is_ready()

    def result(self) -> StepOutput:
        """Waits for the step; token ids and log-probabilities by row."""
        taken = np.asarray(self.output)[: self.num_steps, :, : self.num_rows]
        token_ids, bits = np.ascontiguousarray(taken.transpose(1, 2, 0))
        logprobs = bits.view(np.float32).tolist()
        output = StepOutput(token_ids.tolist(), logprobs)
        if self.details is not None:
            packed = np.asarray(self.details)[: self.num_steps]
            for row, count in self.wanted.items():
                output.details[row] = unpack_details(packed[:, row], logprobs[row], count)
        for scores in self.scores:
            scores.add_to(output)
        return output


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
        self.processors = load_processors(config.logits_processors, model.vocab_size)
        self.executables = self._executables(partial(self._lower, size=self.size), self._signature)
        self.layouts = {bucket: self._layout(bucket) for bucket in self.ladder.all}
        _, cache, state, _ = self._arguments(self.ladder.all[0], self.size)
        self.preparation = Preparation(cache, state, self.executables.store)
        self.host = HostMemory(cache, self.size, self._staged_chunks, self.executables.store)
        self.swap_costs: SwapCosts | None = None
        """None until the start, where there is no host memory, and where programs are compiled when they are met."""
        self.scoring = self._executables(self._lower_scoring, self._scoring_signature)
        self.logprob_seats = LogprobSeats()
        self.compiled_at_ready = 0
        self.counts = StepCounts()

    def start(self, load: Callable[[ParamSpecs], Mapping[str, jax.Array]], progress: bool = True) -> None:
        """Compiles every bucket while `load` brings the parameters; then nothing compiles any more.

        Raises:
            ValueError: the devices do not have the memory.
        """
        weight_bytes, cache_bytes, state_bytes = self._held_bytes(self.size)
        check_room(self._devices, cache_bytes, weight_bytes + state_bytes + self.temp + self._staged_bytes)
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
                self.scoring.cancel()
                raise
        jax.block_until_ready((self.params, self.cache, self.state))
        self._measure_swapping()
        self.compiled_at_ready = num_compilations()

    @property
    def num_compiles_since_ready(self) -> int:
        return num_compilations() - self.compiled_at_ready

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step on the device."""
        admits = any(row.admitted for row in plan.rows)
        num_tokens, num_steps = plan.num_tokens, plan.num_steps
        if admits:
            self.logprob_seats.note(plan)
        prompts = self.logprob_seats.wanted_prompts(plan)
        places = self.logprob_seats.wanted_places(plan)
        bucket = self.ladder.select(num_tokens, len(plan.rows), admits or bool(prompts or places))
        step = self.executables.get(bucket)
        with annotate("pack"):
            packed = self.layouts[bucket].pack(plan)
        with annotate_launch(plan, bucket.name):
            if plan.swap_out or plan.swap_in:
                self.cache = self.host.run(plan, self.cache)
            if admits:
                self.cache, self.state = self.preparation.run(plan, self.cache, self.state)
            self.cache, self.state, result = step(self.params, self.cache, self.state, packed)
            result.sampled.copy_to_host_async()
        wanted = self.logprob_seats.wanted_answers(plan)
        if wanted:
            result.details.copy_to_host_async()
        scores = self._score(result.hidden, prompts, places) if prompts or places else ()
        self.counts.add(num_steps, sum(row.num_tokens * row.num_steps for row in plan.rows), bucket.tokens * num_steps)
        details = result.details if wanted else None
        return PendingStep(result.sampled, len(plan.rows), num_steps, details, wanted, scores)

    def _score(
        self, hidden: jax.Array, prompts: Sequence[PromptPart], places: Sequence[AnswerPlace]
    ) -> list[PendingScores | PendingDistributions]:
        """Starts what is made of a step's hidden states."""
        scores: list[PendingScores | PendingDistributions] = []
        narrow, wide = ([part for part in prompts if is_wide(part.num_top) == one] for one in (False, True))
        if narrow:
            score = partial(self.scoring.get(ScoringShape(len(hidden))), self.params)
            scores.append(launch_scoring(score, hidden, narrow))
        if wide or places:
            compute = partial(self.scoring.get(DistributionShape(len(hidden))), self.params, hidden)
            scores.append(PendingDistributions(compute, wide, places))
        return scores

    def memory_report(self) -> tuple[DeviceMemory, ...]:
        """What the engine holds on every device."""
        temp = temp_bytes(self.executables.compiled.values())
        return tuple(report(device, self.params, self.cache, self.state, temp) for device in self.mesh.devices.flat)

    def close(self) -> None:
        """Frees the device memory of parameters, cache and state."""
        for array in jax.tree.leaves((self.params, self.cache, self.state)):
            if not array.is_deleted():
                array.delete()
        self.host.close()
        self.executables.compiled.clear()
        self.scoring.compiled.clear()

    def _allocate(self, specs: Any, compiling: Future[None]) -> Any:
        self.host.allocate()
        if self.platform != "cpu":
            compiling.result()  # until then autotuning needs the memory
        return allocate(specs)

    def _compile_all(self, progress: bool) -> None:
        if not self.config.enforce_eager:
            self.executables.compile_all(self.ladder.all, progress)
            wide = may_be_wanted(self.config.max_logprobs, self.model.vocab_size)
            kinds = (ScoringShape, DistributionShape) if wide else (ScoringShape,)
            shapes = [kind(bucket.tokens) for kind in kinds for bucket in self.ladder.mixed]
            self.scoring.compile_all(shapes, progress=False)
            self.preparation.compile()
            self.host.compile()

    def _measure_swapping(self) -> None:
        """Times copies of K/V to the host and back, and what computing them again takes: a step without rows."""
        if not self.size.host_chunks or self.config.enforce_eager:
            return
        self.cache, out_seconds, in_seconds = self.host.measure(self.cache)
        bucket = min(self.ladder.mixed, key=lambda bucket: abs(bucket.tokens - TIMED_TOKENS))
        step, packed = self.executables.get(bucket), self.layouts[bucket].pack(StepPlan())
        start = 0.0
        for _ in range(2):  # the first time is slow
            start = time.perf_counter()
            self.cache, self.state, _ = jax.block_until_ready(step(self.params, self.cache, self.state, packed))
        token_seconds = (time.perf_counter() - start) / bucket.tokens
        self.swap_costs = SwapCosts(self.host.chunk_bytes, out_seconds, in_seconds, token_seconds)
        logger.info("K/V of %d tokens: %s", self.size.chunk_tokens, self.swap_costs)

    def _define(self, config: EngineConfig, model: ModelConfig) -> None:
        """Sets what follows from the configuration and the model alone."""
        max_model_len, block_size = config.max_model_len, config.block_size
        assert isinstance(max_model_len, int) and isinstance(block_size, int), "unresolved defaults"
        assert config.max_num_seqs and config.max_num_batched_tokens, "unresolved defaults"
        self.config, self.model = config, model.for_context(max_model_len)
        fastest: Backend = "xla" if self.platform == "cpu" else "pallas"
        backend = fastest if config.attention_backend == "auto" else config.attention_backend
        self.setting = Setting(self.dtype, self.mesh, backend)
        self.definition = define_model(self.model, self.setting)
        self.ladder = make_ladder(config.max_num_seqs, config.max_num_batched_tokens, self.platform)
        self.block_size = block_size
        # Not more than a block has tokens: a row then begins one new block in a call at the most.
        has_loops = self.platform != "cpu" and not (self.mesh.size > 1 and config.disable_custom_all_reduce)
        default_steps = GPU_STEPS if has_loops else 1
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
        temp = remember(file, partial(self._measure_temp, probed))
        return MemoryBudget(limit, weights, state, temp, self._staged_bytes)

    @property
    def _staged_chunks(self) -> int:
        """Chunks of host memory that may be on the devices at once, on their way out or in."""
        plan = self._unmeasured_plan
        return staged_chunks(memory_limit(self._devices), plan.chunk_bytes) if plan.host_chunks else 0

    @property
    def _staged_bytes(self) -> int:
        """Bytes of one device that chunks on their way out and in may take."""
        return 2 * self._staged_chunks * self._unmeasured_plan.chunk_bytes

    @property
    def _unmeasured_plan(self) -> CachePlan:
        """The sizes that follow from the configuration and the model alone."""
        return CachePlan(self.config, self.model, self.dtype.itemsize, None)

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

    def _executables(self, lower: Callable[[Any], jax.stages.Lowered], signature: Callable[[Any], Signature]):
        config = self.config
        store = None
        # What a processor does cannot be told from its name.
        if config.compilation_cache and not (config.enforce_eager or self.processors) and may_store(self.platform):
            size = dataclasses.replace(self.size, host_chunks=0)  # no program depends on it
            shape = (size, self.dtype, self.ladder, self.max_blocks, self.max_steps)
            facts = (self.model, *shape, config.attention_backend, config.disable_custom_all_reduce)
            store = ExecutableStore(self._devices, facts)
        options = (EAGER_OPTIONS if config.enforce_eager else GRAPH_OPTIONS).get(self.platform, {})
        options = with_all_reduce(options, self.mesh, nccl=config.disable_custom_all_reduce)
        return Executables(lower, signature, store, options)

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
        hidden = packed if self._returns_hidden(bucket) else None
        return arguments, (cache, state, StepResult(packed, packed, hidden))  # only the structure matters

    def _returns_hidden(self, bucket: Bucket) -> bool:
        return bucket.admits or self.max_steps == 1

    def _lower(self, bucket: Bucket, size: CacheSize) -> jax.stages.Lowered:
        layout = self._layout(bucket)
        arguments = self._arguments(bucket, size)

        sampler = partial(sample, backend=self.setting.backend, processors=self.processors)

        def step(leaves, cache, state, packed):
            max_steps = 1 if bucket.admits else self.max_steps
            model = self.definition.merge(leaves)
            with jax.named_scope("prepare"):
                given = layout.unpack(packed)
            return run_steps(model, cache, state, given, sampler, max_steps)

        step.__name__ = bucket.name.replace("-", "_")
        shardings = jax.tree.map(lambda spec: spec.sharding, (*arguments[1:3], arguments[3]))
        with self._precise():
            return jax.jit(step, donate_argnums=(1, 2), out_shardings=shardings).lower(*arguments)

    def _scoring_signature(self, shape: ScoringShape | DistributionShape) -> Signature:
        everywhere = replicated(self.mesh)
        hidden = jax.ShapeDtypeStruct((shape.tokens, self.model.hidden_size), self.dtype, sharding=everywhere)
        indices = jax.ShapeDtypeStruct((shape.num_indices,), jnp.int32, sharding=everywhere)
        return (tuple(self.definition.specs.values()), hidden, indices), indices  # only the structure matters

    def _lower_scoring(self, shape: ScoringShape | DistributionShape) -> jax.stages.Lowered:
        arguments, indices = self._scoring_signature(shape)

        def score(leaves, hidden, indices):
            return shape.compute(self.definition.merge(leaves), hidden, indices)

        score.__name__ = shape.name.replace("-", "_")
        with self._precise():
            return jax.jit(score, out_shardings=indices.sharding).lower(*arguments)

    def _precise(self) -> contextlib.AbstractContextManager[Any]:
        is_float32 = self.dtype == jnp.float32
        return jax.default_matmul_precision("highest") if is_float32 else contextlib.nullcontext()
