"""What the K/V cache holds at a moment, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixCacheStats:
    """Tokens of admitted requests, since the engine was made."""

    queries: int = 0
    """Tokens that were looked up: all of a request, each time it is admitted."""
    hits: int = 0
    """Tokens among them whose K/V were there."""
    host_hits: int = 0
    """Those of them that came from host memory."""

    @property
    def hit_rate(self) -> float:
        """From 0 to 1."""
        return self.hits / max(self.queries, 1)


@dataclass(frozen=True)
class HostStats:
    """Blocks in host memory."""

    total_blocks: int = 0
    used_blocks: int = 0
    """Those that swapped requests hold."""
    cached_blocks: int = 0
    """Blocks whose contents can be found, by requests that need the same; some of them are used."""
    num_swapped: int = 0
    """Requests that are swapped out."""

    @property
    def usage(self) -> float:
        """Share of the blocks that swapped requests hold, from 0 to 1."""
        return self.used_blocks / max(self.total_blocks, 1)


@dataclass(frozen=True)
class KVStats:
    """Blocks of the pool; free and used ones add up to the total."""

    total_blocks: int
    """Blocks that requests can hold: all but the null block."""
    free_blocks: int
    """Blocks that nobody holds."""
    cached_blocks: int
    """Those of them whose contents can be found again, until memory is needed."""
    used_blocks: int
    """Blocks that requests hold, each once."""
    shared_blocks: int
    """Those held by several requests."""
    used_tokens: int
    """Tokens in used blocks, each once."""
    prefix_cache: PrefixCacheStats
    host: HostStats
