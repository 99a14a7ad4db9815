"""What an engine says of its steps: a line for each at level debug, one every ten seconds of work at level info.

Tokens in are those of requests that were admitted, found in the prefix cache or not.
Invariant: at other levels a step costs two looks at the clock. Nothing is said while nothing runs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.outputs import TokenOutput
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.scheduling.kv_stats import PrefixCacheStats
from jaxllm.scheduling.plan import StepPlan
from jaxllm.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds."""


@dataclass(slots=True)
class _Interval:
    """What happened since the last line."""

    began: float
    newest: float
    """When the newest step ended."""
    prefix_cache: PrefixCacheStats
    """As it was at the beginning."""
    num_written: int = 0


class StepLog:
    """The log of one engine core's steps, and how long all of them took."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.seconds = 0.0
        """What steps took, from when there was something to launch until their tokens were read."""
        self._scheduler = scheduler
        self._runner = runner
        self._began = 0.0
        self._interval = _Interval(-math.inf, -math.inf, PrefixCacheStats())

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def end(self, plan: StepPlan, outputs: Sequence[TokenOutput]) -> None:
        """The step was read."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self.seconds += seconds
        if not logger.isEnabledFor(logging.INFO):
            return
        if logger.isEnabledFor(logging.DEBUG):
            self._tell_step(plan, seconds)
        self._tell_interval(outputs, now)

    def _tell_step(self, plan: StepPlan, seconds: float) -> None:
        scheduler, rows, tokens = self._scheduler, len(plan.rows), plan.num_tokens
        bucket = self._runner.programs.ladder.select(tokens, rows, any(row.admitted for row in plan.rows))
        logger.debug(
            "step: %.2f ms, rows %d, tokens %d of %s (padding %.0f%%), steps %d; running %d, waiting %d, "
            "swapped %d, free blocks %d",
            1e3 * seconds,
            rows,
            tokens,
            bucket.name,
            100 * (1 - tokens / bucket.tokens),
            plan.num_steps,
            scheduler.num_running,
            scheduler.num_waiting - scheduler.num_swapped,
            scheduler.num_swapped,
            scheduler.kv.num_free_blocks,
        )

    def _tell_interval(self, outputs: Sequence[TokenOutput], now: float) -> None:
        interval, scheduler = self._interval, self._scheduler
        seconds, is_old = now - interval.began, now - interval.newest > INTERVAL
        interval.newest = now
        interval.num_written += sum([len(output.new_token_ids) for output in outputs])
        if seconds < INTERVAL:
            return
        prefix_cache = scheduler.kv.stats().prefix_cache
        if not is_old:  # else nothing ran for long, and a mean would say nothing
            queries = prefix_cache.queries - interval.prefix_cache.queries
            hits = prefix_cache.hits - interval.prefix_cache.hits
            logger.info(
                "%.1f tokens/s in, %.1f out; running %d, waiting %d, swapped %d; K/V cache %.1f%% used, prefix hits %.1f%%",
                queries / seconds,
                interval.num_written / seconds,
                scheduler.num_running,
                scheduler.num_waiting - scheduler.num_swapped,
                scheduler.num_swapped,
                100 * scheduler.kv.usage,
                100 * hits / max(queries, 1),
            )
        self._interval = _Interval(now, now, prefix_cache)
