"""What a server asks its engine about itself, as numbers.

Invariant: the totals only grow, from the moment the engine was ready.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """An engine at a moment."""

    num_running: int = 0
    """Requests with a seat; each answer of n > 1 counts."""
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the K/V cache's blocks that requests hold, from 0 to 1."""
    num_used_blocks: int = 0
    num_blocks: int = 0
    """Blocks that requests can hold."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Tokens among them whose K/V were there."""
    num_compiles_since_ready: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    """Tokens that steps were asked to compute."""
    num_padded_tokens: int = 0
    """Tokens of the buckets they were computed in."""
    num_prompt_tokens: int = 0
    """Of requests that got their first token; each answer of n > 1 counts."""
    num_cached_prompt_tokens: int = 0
    """Tokens among them whose K/V were in the cache already."""
    num_generated_tokens: int = 0

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that nobody asked for, from 0 to 1."""
        return 1 - self.num_step_tokens / self.num_padded_tokens if self.num_padded_tokens else 0.0
