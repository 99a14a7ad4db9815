"""Notices when requests are preempted again and again: the cache is too small for what runs.

Invariant: it only counts and warns; it decides nothing.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

PREEMPTIONS_PER_WARNING = 50


class ThrashCounter:
    """Preemptions since the engine was made, and what they cost."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        """Tokens of preempted requests whose K/V were given up; the prefix cache may bring some of them back."""

    def note(self, num_computed: int) -> None:
        """A request with so many computed tokens was preempted."""
        self.num_preemptions += 1
        self.num_lost_tokens += num_computed
        if self.num_preemptions % PREEMPTIONS_PER_WARNING == 0:
            logger.warning(
                "the K/V cache is too small for what runs: %d requests were preempted so far, %d tokens' K/V were given "
                "up. Raise gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override, or lower "
                "max_num_seqs",
                self.num_preemptions,
                self.num_lost_tokens,
            )
