"""What an engine compiles: its steps, one for each bucket, and what is made of the hidden states of steps.

Everything follows from the configuration, the model and the mesh; the number of blocks is an argument, since it is
measured by means of these programs. Invariant: shapes only, no array of a device is held here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.kernels.backend import Backend
from jaxllm.memory import CacheSize
from jaxllm.model_config import ModelConfig
from jaxllm.models.layers import Setting
from jaxllm.models.parameters import define_model
from jaxllm.parallel.all_reduce import with_all_reduce
from jaxllm.parallel.sharding import replicated
from jaxllm.runner.buckets import Bucket, make_ladder
from jaxllm.runner.device_memory import shard_bytes
from jaxllm.runner.device_state import state_specs
from jaxllm.runner.distributions import DistributionShape
from jaxllm.runner.executable_store import ExecutableStore, may_store
from jaxllm.runner.executables import Executables, Signature
from jaxllm.runner.kv_cache import cache_specs
from jaxllm.runner.logits_processors import load_processors
from jaxllm.runner.prompt_scoring import ScoringShape
from jaxllm.runner.sampler import sample
from jaxllm.runner.step import StepResult, run_steps
from jaxllm.runner.step_input import StepLayout, most_admitted_blocks

EAGER_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": ""}}
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
GRAPH_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": GRAPHS}}
"""XLA's own choice, and loops: several steps are one CUDA graph."""
GPU_STEPS = 4
"""Most steps of a call on a GPU, by default: a host that is four times too slow still keeps up. Not with NCCL, whose
sums cannot be captured in a loop: a loop that is no graph waits for the host after every step."""

type Scoring = ScoringShape | DistributionShape


class Programs:
    """The programs of one model on one mesh.

    Args:
        config: the user's choices, with every default resolved and max_model_len a number.
        model: facts of the checkpoint.
        mesh: where they run.

    Raises:
        ValueError: a logits processor is none.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Mesh):
        max_model_len, block_size, max_num_seqs = config.max_model_len, config.block_size, config.max_num_seqs
        assert isinstance(max_model_len, int) and isinstance(block_size, int), "unresolved defaults"
        assert max_num_seqs and config.max_num_batched_tokens, "unresolved defaults"
        self.config, self.model, self.mesh = config, model.for_context(max_model_len), mesh
        self.dtype = jnp.dtype(config.dtype)
        self.platform = mesh.devices.flat[0].platform
        fastest: Backend = "xla" if self.platform == "cpu" else "pallas"
        backend = fastest if config.attention_backend == "auto" else config.attention_backend
        self.setting = Setting(self.dtype, mesh, backend, config.batch_invariant)
        self.definition = define_model(self.model, self.setting)
        self.processors = load_processors(config.logits_processors, model.vocab_size)
        self.ladder = make_ladder(max_num_seqs, config.max_num_batched_tokens, self.platform)
        self.max_num_seqs, self.block_size = max_num_seqs, block_size
        self.max_blocks = -(-max_model_len // block_size)
        """Most blocks of a request."""
        self.admitted_blocks = most_admitted_blocks(self.max_blocks, max_num_seqs)
        """Most blocks of requests that take their seats in one step."""
        has_loops = self.platform != "cpu" and not (mesh.size > 1 and config.disable_custom_all_reduce)
        default_steps = GPU_STEPS if has_loops else 1
        # Not more than a block has tokens: a row then begins one new block in a call at the most.
        self.max_steps = min(config.num_scheduler_steps or default_steps, block_size)
        """Most steps of a call."""

    def make_steps(self, size: CacheSize) -> Executables[Bucket]:
        """The steps over a cache of this size."""
        lower, signature = partial(self.lower_step, size=size), partial(self._step_signature, size=size)
        return Executables(lower, signature, self._store(size), self._compiler_options())

    def make_scorings(self, size: CacheSize) -> Executables[Scoring]:
        """What is made of hidden states, in an engine with a cache of this size."""
        options = self._compiler_options()
        return Executables(self._lower_scoring, self._scoring_signature, self._store(size), options)

    def _store(self, size: CacheSize) -> ExecutableStore | None:
        config = self.config
        # What a processor does cannot be told from its name.
        if config.enforce_eager or self.processors or not (config.compilation_cache and may_store(self.platform)):
            return None
        size = dataclasses.replace(size, host_chunks=0)  # no program depends on it
        shape = (size, self.dtype, self.ladder, self.max_blocks, self.max_steps)
        facts = (self.model, *shape, self.setting.backend, config.batch_invariant, config.disable_custom_all_reduce)
        return ExecutableStore(list(self.mesh.devices.flat), facts)

    def _compiler_options(self) -> dict[str, Any]:
        options = (EAGER_OPTIONS if self.config.enforce_eager else GRAPH_OPTIONS).get(self.platform, {})
        return with_all_reduce(options, self.mesh, nccl=self.config.disable_custom_all_reduce)

    def held_bytes(self, size: CacheSize) -> tuple[int, int, int]:
        """Bytes of weights, cache and state on one device."""
        weights, cache, state, _ = self.step_arguments(self.ladder.all[0], size)
        return shard_bytes(weights), shard_bytes(jax.tree.leaves(cache)), shard_bytes(jax.tree.leaves(state))

    def layout(self, bucket: Bucket) -> StepLayout:
        """Where a step of this bucket finds its input."""
        return StepLayout(bucket, self.admitted_blocks, self.max_num_seqs, self.model.vocab_size)

    def step_arguments(self, bucket: Bucket, size: CacheSize) -> tuple[Any, Any, Any, Any]:
        """Specs of a step's arguments: parameters, cache, state, packed input."""
        cache = cache_specs(size, self.model, self.dtype, self.mesh)
        state = state_specs(self.max_num_seqs, self.max_blocks, self.model.vocab_size, self.mesh)
        packed = jax.ShapeDtypeStruct((self.layout(bucket).size,), jnp.int32, sharding=replicated(self.mesh))
        return tuple(self.definition.specs.values()), cache, state, packed

    def _step_signature(self, bucket: Bucket, size: CacheSize) -> Signature:
        arguments = self.step_arguments(bucket, size)
        _, cache, state, packed = arguments
        hidden = packed if bucket.admits or self.max_steps == 1 else None
        return arguments, (cache, state, StepResult(packed, packed, hidden))  # only the structure matters

    def lower_step(self, bucket: Bucket, size: CacheSize) -> jax.stages.Lowered:
        """The step of this bucket, over a cache of this size."""
        layout = self.layout(bucket)
        arguments = self.step_arguments(bucket, size)

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

    def _scoring_signature(self, shape: Scoring) -> Signature:
        everywhere = replicated(self.mesh)
        hidden = jax.ShapeDtypeStruct((shape.tokens, self.model.hidden_size), self.dtype, sharding=everywhere)
        indices = jax.ShapeDtypeStruct((shape.num_indices,), jnp.int32, sharding=everywhere)
        return (tuple(self.definition.specs.values()), hidden, indices), indices  # only the structure matters

    def _lower_scoring(self, shape: Scoring) -> jax.stages.Lowered:
        arguments, indices = self._scoring_signature(shape)

        def score(leaves, hidden, indices):
            return shape.compute(self.definition.merge(leaves), hidden, indices)

        score.__name__ = shape.name.replace("-", "_")
        with self._precise():
            return jax.jit(score, out_shardings=indices.sharding).lower(*arguments)

    def _precise(self) -> contextlib.AbstractContextManager[Any]:
        is_float32 = self.dtype == jnp.float32
        return jax.default_matmul_precision("highest") if is_float32 else contextlib.nullcontext()
