"""LLM inference and serving in JAX.

The names below are loaded when they are first used, so that `jaxllm --help` does not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig
    from jaxllm.engine.engine import LLMEngine
    from jaxllm.llm import LLM
    from jaxllm.memory import calculate_kv_cache_blocks
    from jaxllm.outputs import CompletionOutput, RequestOutput
    from jaxllm.sampling_params import BeamSearchParams, SamplingParams

_MODULES = {
    "LLM": "jaxllm.llm",
    "LLMEngine": "jaxllm.engine.engine",
    "EngineConfig": "jaxllm.config",
    "SamplingParams": "jaxllm.sampling_params",
    "BeamSearchParams": "jaxllm.sampling_params",
    "RequestOutput": "jaxllm.outputs",
    "CompletionOutput": "jaxllm.outputs",
    "calculate_kv_cache_blocks": "jaxllm.memory",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "calculate_kv_cache_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
