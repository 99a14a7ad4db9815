"""How large a model's cache is on its devices and, where the user left it open, how long a request may be.

Invariant: it follows from what is the same at every start: the configuration, what the devices grant, and the
temporaries of the largest step, which are measured once by compiling it for a model of few layers.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from functools import partial

from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.memory import CacheSize, MemoryBudget
from jaxllm.model_config import ModelConfig
from jaxllm.runner.device_memory import check_room, memory_limit, remember, temp_bytes
from jaxllm.runner.executable_store import ExecutableStore
from jaxllm.runner.host_memory import staged_chunks
from jaxllm.runner.kv_cache import CachePlan
from jaxllm.runner.programs import Programs

logger = logging.getLogger(__name__)

PROBED_LAYERS = 8
"""Layers use each other's temporaries: those of a few are those of all."""


@dataclass(frozen=True)
class Fitted:
    """A model's programs, and the cache that its devices have room for."""

    programs: Programs
    size: CacheSize
    budget: MemoryBudget | None
    """Of one device; None where nothing has to be measured or nobody says how much there is."""
    staged_chunks: int
    """Chunks of host memory that may be on the devices at once, on their way out, and as many on their way in."""

    def check_room(self) -> None:
        """Makes sure that the devices have what the engine is about to take.

        Raises:
            ValueError: they do not.
        """
        weights, cache, state = self.programs.held_bytes(self.size)
        temp = self.budget.temp if self.budget else 0
        staged = _staged_bytes(_plan(self.programs, None), self.staged_chunks)
        check_room(list(self.programs.mesh.devices.flat), cache, weights + state + temp + staged)


def fit(config: EngineConfig, model: ModelConfig, mesh: Mesh) -> Fitted:
    """Fits a model with its cache into the memory of the mesh's devices.

    Args:
        config: the user's choices, with every default resolved but max_model_len="auto".

    Raises:
        ValueError: there is no room for one request.
    """
    is_auto = config.max_model_len == "auto"
    longest = model.max_position_embeddings if is_auto else config.max_model_len
    programs = Programs(dataclasses.replace(config, max_model_len=longest), model, mesh)
    unmeasured, limit = _plan(programs, None), memory_limit(list(mesh.devices.flat))
    num_staged = staged_chunks(limit, unmeasured.chunk_bytes) if unmeasured.host_chunks else 0
    budget = _budget(programs, limit, _staged_bytes(unmeasured, num_staged))
    if is_auto:
        longest = _plan(programs, budget).longest_context()
        logger.info("max_model_len='auto' is %d", longest)
        programs = Programs(dataclasses.replace(config, max_model_len=longest), model, mesh)
    return Fitted(programs, _plan(programs, budget).size(), budget, num_staged)


def _plan(programs: Programs, budget: MemoryBudget | None) -> CachePlan:
    return CachePlan(programs.config, programs.model, programs.dtype.itemsize, budget)


def _staged_bytes(plan: CachePlan, num_staged: int) -> int:
    """Bytes of one device that chunks on their way out and in may take."""
    return 2 * num_staged * plan.chunk_bytes


def _budget(programs: Programs, limit: int | None, staged_bytes: int) -> MemoryBudget | None:
    config = programs.config
    if limit is None or config.num_gpu_blocks_override or config.kv_cache_memory_bytes:
        return None
    probed = CacheSize(programs.max_blocks + 1, programs.block_size)
    weights, _, state = programs.held_bytes(probed)
    facts = (
        programs.model,
        probed,
        programs.dtype,
        programs.ladder,
        config.attention_backend,
        config.batch_invariant,
        "temporaries",
    )
    store = ExecutableStore(list(programs.mesh.devices.flat), facts) if config.compilation_cache else None
    temp = remember(store and store.folder / "temp", partial(_measure_temp, programs, probed))
    return MemoryBudget(limit, weights, state, temp, staged_bytes)


def _measure_temp(programs: Programs, size: CacheSize) -> int:
    """Bytes of temporaries of the largest step, found by compiling it for a model of few layers."""
    model = programs.model
    num_layers = min(model.num_layers, PROBED_LAYERS)
    few = dataclasses.replace(model, num_layers=num_layers, layers=model.layers[:num_layers])
    step = Programs(programs.config, few, programs.mesh).lower_step(programs.ladder.mixed[-1], size)
    return temp_bytes([step.compile()])
