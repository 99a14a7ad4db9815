"""What a server asks its engine about itself, as numbers.

Invariant: totals only grow, from the moment the engine was ready.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineStats:
    """An engine at a moment."""

    num_running: int = 0
    """Requests with a seat; each answer of n > 1 counts."""
    num_waiting: int = 0
    num_swapped: int = 0
    """Requests whose K/V are in host memory; they are not among the waiting ones."""
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
    host_cache_hits: int = 0
    """Those of them that came from host memory."""
    host_cache_usage: float = 0.0
    """Share of host memory's blocks that swapped requests hold, from 0 to 1."""
    num_host_blocks: int = 0
    """Blocks that host memory holds."""
    bytes_swapped_out: int = 0
    """Bytes of K/V copied to host memory."""
    bytes_swapped_in: int = 0
    """Bytes of K/V copied back."""
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
    step_seconds: float = 0.0
    """What all steps took."""

    resident_bytes: int = 0
    """Host memory of the engine's process."""
    device_bytes_in_use: dict[str, int] = field(default_factory=dict)
    """What the process holds on each device, whose platform says that."""
    device_bytes_limit: dict[str, int] = field(default_factory=dict)
    """What it may take there."""

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that nobody asked for, from 0 to 1."""
        return 1 - self.num_step_tokens / self.num_padded_tokens if self.num_padded_tokens else 0.0
