"""The engine's core: scheduler and runner, token ids in and token ids out.

It keeps up to `max_steps_in_flight` steps launched: the next one is planned and sent before the oldest
is read, so that the device does not wait for the host. The tokens are those of the synchronous order.
A step that leaves no request unfinished leaves nothing in flight either.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from pathlib import Path

from jaxllm.engine.logprobs import attach_details
from jaxllm.engine.pacing import StepPacer
from jaxllm.engine.step_log import StepLog
from jaxllm.outputs import TokenOutput
from jaxllm.profiling.session import ProfilerSession
from jaxllm.request import FinishReason, Request
from jaxllm.runner.annotations import annotate, annotate_step
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.runner.pending_step import PendingStep
from jaxllm.scheduling.plan import StepPlan
from jaxllm.scheduling.policy_choice import make_order, make_victims
from jaxllm.scheduling.scheduler import Scheduler, StepLimits
from jaxllm.scheduling.swap_rule import SwapRule

logger = logging.getLogger(__name__)

type InFlight = deque[tuple[StepPlan, PendingStep]]


class EngineCore:
    """Runs requests on a started runner.

    Raises:
        RuntimeError: (any method) the engine was closed, or an earlier step failed.
    """

    def __init__(self, runner: ModelRunner):
        config = runner.config
        assert config.max_num_seqs and config.max_num_batched_tokens, "unresolved defaults"
        self.runner = runner
        limits = StepLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            runner.programs.admitted_blocks,
            config.long_prefill_token_threshold,
        )
        order = make_order(config.scheduling_policy)
        victims = make_victims(config.preemption_victim, order)
        rule = SwapRule(config.preemption_mode, runner.swap_costs)
        self.scheduler = Scheduler(limits, runner.size, config.enable_prefix_caching, order, victims, rule)
        self.log = StepLog(self.scheduler, runner)
        self._in_flight: InFlight = deque()
        self._pacer = StepPacer(runner.programs.max_steps)
        self._session: ProfilerSession | None = None
        self._ended_session: ProfilerSession | None = None
        self._end: Exception | None = None
        self._waits = False
        """For the device: nothing is half done."""
        # XLA ends the process badly if it exits while a step runs.
        self._drain_at_exit = weakref.finalize(self, _wait_for, self._in_flight)

    def add_request(self, request: Request) -> None:
        self._check_alive()
        self.scheduler.add(request)

    def step(self) -> list[TokenOutput]:
        """Launches what can be launched and reads the oldest step; empty if there is nothing to do.

        Ctrl-C while it waits for the device changes nothing. Anywhere else it ends the engine: in a step that is half
        planned, blocks count as computed that never will be.
        """
        self._check_alive()
        self._waits = False
        try:
            self.log.begin()
            with annotate_step():
                outputs = self._run_step()
        except BaseException as error:
            if isinstance(error, Exception) or not self._waits:
                self.give_up(error)
            raise
        return outputs

    def give_up(self, error: BaseException) -> None:
        """No step can follow this one, of which something is lost."""
        is_interrupt = not isinstance(error, Exception)
        self._end = RuntimeError(f"{type(error).__name__} came in the middle of a step") if is_interrupt else error

    def abort(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        """Ends a request; its blocks are free at once. False if it had ended before."""
        return self.scheduler.abort(request_id, reason, stop_reason)

    def reset_prefix_cache(self) -> bool:
        """Forgets cached K/V; False and nothing changed while requests hold some."""
        if not self.scheduler.kv.reset_prefix_cache():
            holders = self.scheduler.num_running + self.scheduler.num_swapped
            logger.warning("the prefix cache is not reset: %d requests have K/V in it or in host memory", holders)
            return False
        return True

    def start_profile(self, folder: Path) -> ProfilerSession:
        """Records what runs from now on, below `folder`; a step in between is not cut.

        Raises:
            ValueError: something is being recorded, or written, already.
            OSError: the folder cannot be written to.
            RuntimeError: the engine is closed or failed.
        """
        self._check_alive()
        if self._session is not None:
            raise ValueError("a profile is being recorded already: stop it before another one is started")
        if self._ended_session is not None:
            if not self._ended_session.is_written:
                raise ValueError("the last profile is being written: start another one when that is done")
            self._ended_session.stop()  # where it could not be written
        self._session = ProfilerSession(self.runner, folder, len(self._in_flight))
        return self._session

    def end_profile(self) -> ProfilerSession:
        """Ends the recording; the session has to be written, which a thread can do while steps go on.

        Raises:
            ValueError: nothing is being recorded.
            OSError: the folder cannot be written to any more.
        """
        if self._session is None:
            raise ValueError("no profile is being recorded: start one first")
        self._ended_session, self._session = self._session, None
        self._ended_session.end()
        return self._ended_session

    def stop_profile(self) -> Path:
        """Ends the recording and writes it; returns its folder, for `jaxllm.profiling.report.write_report`.

        Raises as `end_profile` does.
        """
        return self.end_profile().write()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def close(self) -> None:
        """Waits for launched steps and frees the device's memory; a second call does nothing."""
        if not self._drain_at_exit.alive:
            return
        self._end = self._end or RuntimeError("the engine is closed")
        try:
            self._drain_at_exit()
        finally:
            try:
                if self._session is not None:
                    self.stop_profile()
            finally:
                self.runner.close()

    def _run_step(self) -> list[TokenOutput]:
        self._launch_ahead()
        outputs = self._read_oldest() if self._in_flight else []
        while self._in_flight and not self.scheduler.has_unfinished:
            self._read_oldest()  # computed past the end of the last request
        return outputs

    def _launch_ahead(self) -> None:
        limit = self.runner.config.max_steps_in_flight
        while len(self._in_flight) < limit and (plan := self._schedule()):
            self._in_flight.append((plan, self.runner.launch(plan)))
        stuck = not self._in_flight and self.scheduler.has_unfinished
        assert not stuck, "requests wait, but nothing can be computed"

    def _schedule(self) -> StepPlan:
        with annotate("schedule"):
            # Within a loop a profiler sees the kernels of its first turn only.
            return self.scheduler.schedule(1 if self._session else self._pacer.num_steps)

    def _read_oldest(self) -> list[TokenOutput]:
        plan, pending = self._in_flight[0]
        if len(self._in_flight) > 1:
            self._pacer.note_read(pending.is_ready)
        with annotate("read"):
            self._waits = True
            output = pending.result()  # may be interrupted: the step is then still there
            self._waits = False
        self._in_flight.popleft()
        with annotate("update"):
            token_outputs = self.scheduler.update(plan, output)
            if output.details or output.prompts:
                attach_details(plan, output, token_outputs)
        self.log.end(plan, token_outputs)
        return token_outputs

    def _check_alive(self) -> None:
        if self._end is not None:
            raise RuntimeError(f"the engine cannot go on: {self._end}. Make a new one") from self._end


def _wait_for(in_flight: InFlight) -> None:
    while in_flight:
        in_flight.popleft()[1].result()
