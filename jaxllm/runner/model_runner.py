"""Turns plans into device work: owns the parameters, the cache, the state and the compiled steps.

`launch` returns at once. Steps run on the device in the order of their launches, which is what makes run-ahead and
the reuse of freed blocks sound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.memory import DeviceMemory, SwapCosts
from jaxllm.model_config import ModelConfig
from jaxllm.runner.annotations import annotate, annotate_launch
from jaxllm.runner.compile_counter import num_compilations
from jaxllm.runner.device_memory import report, temp_bytes
from jaxllm.runner.distributions import DistributionShape, PendingDistributions, may_be_wanted
from jaxllm.runner.executable_store import enable_compilation_cache
from jaxllm.runner.fitting import fit
from jaxllm.runner.host_memory import HostMemory
from jaxllm.runner.kv_cache import allocate
from jaxllm.runner.logprob_seats import AnswerPlace, LogprobSeats, PromptPart
from jaxllm.runner.pending_step import PendingStep
from jaxllm.runner.preparation import Preparation
from jaxllm.runner.prompt_scoring import PendingScores, ScoringShape, launch_scoring
from jaxllm.runner.step_counts import StepCounts
from jaxllm.sampling_params import is_wide
from jaxllm.scheduling.plan import StepPlan

logger = logging.getLogger(__name__)

type ParamSpecs = Mapping[str, jax.ShapeDtypeStruct]
TIMED_TOKENS = 1024
"""About so many are computed to find out how long a token takes."""


class ModelRunner:
    """One model on one mesh.

    Args:
        config: the user's choices, with every default resolved; `self.config` also has a number for
            max_model_len="auto".
        model: facts of the checkpoint.
        mesh: where it runs.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Mesh):
        if config.compilation_cache:
            enable_compilation_cache(mesh.devices.flat[0].platform)
        self._fitted = fit(config, model, mesh)
        self.programs, self.size = programs, size = self._fitted.programs, self._fitted.size
        self.config, self.model, self.mesh = programs.config, programs.model, mesh
        self.executables, self.scoring = programs.make_steps(size), programs.make_scorings(size)
        self.layouts = {bucket: programs.layout(bucket) for bucket in programs.ladder.all}
        _, cache, state, _ = programs.step_arguments(programs.ladder.all[0], size)
        self._held_specs = cache, state
        self.preparation = Preparation(cache, state, self.executables.store)
        self.host = HostMemory(cache, size, self._fitted.staged_chunks, self.executables.store)
        self.swap_costs: SwapCosts | None = None
        """None until the start, where there is no host memory, and where programs are compiled when they are met."""
        self.logprob_seats = LogprobSeats()
        self.compiled_at_ready = 0
        self.counts = StepCounts()

    def start(self, load: Callable[[ParamSpecs], Mapping[str, jax.Array]], progress: bool = True) -> None:
        """Compiles every bucket while `load` brings the parameters; then nothing compiles any more.

        Raises:
            ValueError: the devices do not have the memory.
        """
        self._fitted.check_room()
        definition = self.programs.definition
        with ThreadPoolExecutor(max_workers=2) as pool:
            compiling = pool.submit(self._compile_all, progress)
            allocating = pool.submit(self._allocate, compiling)
            try:
                self.params = definition.leaves(load(definition.specs))
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
        bucket = self.programs.ladder.select(num_tokens, len(plan.rows), admits or bool(prompts or places))
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

    def _allocate(self, compiling: Future[None]) -> Any:
        self.host.allocate()
        if self.programs.platform != "cpu":
            compiling.result()  # until then autotuning needs the memory
        return allocate(self._held_specs)

    def _compile_all(self, progress: bool) -> None:
        if not self.config.enforce_eager:
            self.executables.compile_all(self.programs.ladder.all, progress)
            wide = may_be_wanted(self.config.max_logprobs, self.model.vocab_size)
            kinds = (ScoringShape, DistributionShape) if wide else (ScoringShape,)
            shapes = [kind(bucket.tokens) for kind in kinds for bucket in self.programs.ladder.mixed]
            self.scoring.compile_all(shapes, progress=False)
            self.preparation.compile()
            self.host.compile()

    def _measure_swapping(self) -> None:
        """Times copies of K/V to the host and back, and what computing them again takes: a step without rows."""
        if not self.size.host_chunks or self.config.enforce_eager:
            return
        self.cache, out_seconds, in_seconds = self.host.measure(self.cache)
        bucket = min(self.programs.ladder.mixed, key=lambda bucket: abs(bucket.tokens - TIMED_TOKENS))
        step, packed = self.executables.get(bucket), self.layouts[bucket].pack(StepPlan())
        start = 0.0
        for _ in range(2):  # the first time is slow
            start = time.perf_counter()
            self.cache, self.state, _ = jax.block_until_ready(step(self.params, self.cache, self.state, packed))
        token_seconds = (time.perf_counter() - start) / bucket.tokens
        self.swap_costs = SwapCosts(self.host.chunk_bytes, out_seconds, in_seconds, token_seconds)
        logger.info("K/V of %d tokens: %s", self.size.chunk_tokens, self.swap_costs)
