"""The engine's core: scheduler and runner, token ids in and token ids out.

It keeps up to `max_steps_in_flight` steps launched: the next one is planned and sent before the oldest
is read, so that the device does not wait for the host. The tokens are those of the synchronous order.
"""

from __future__ import annotations

from collections import deque

from jaxllm.outputs import TokenOutput
from jaxllm.request import FinishReason, Request
from jaxllm.runner.model_runner import ModelRunner, PendingStep
from jaxllm.scheduling.plan import StepPlan
from jaxllm.scheduling.scheduler import Scheduler


class EngineCore:
    """Runs requests on a started runner."""

    def __init__(self, runner: ModelRunner):
        config = runner.config
        assert config.max_num_seqs and config.max_num_batched_tokens, "unresolved defaults"
        self.runner = runner
        self.scheduler = Scheduler(config.max_num_seqs, config.max_num_batched_tokens, runner.size)
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()

    def add_request(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> list[TokenOutput]:
        """Launches what can be launched and reads the oldest step; empty if there is nothing to do."""
        while len(self._in_flight) < self.runner.config.max_steps_in_flight and (plan := self.scheduler.schedule()):
            self._in_flight.append((plan, self.runner.launch(plan)))
        if not self._in_flight:
            assert not self.scheduler.has_unfinished, "requests wait, but nothing can be computed"
            return []
        plan, pending = self._in_flight.popleft()
        return self.scheduler.update(plan, pending.result())

    def abort(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        """Ends a request; its blocks are free at once. False if it had ended before."""
        return self.scheduler.abort(request_id, reason, stop_reason)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def close(self) -> None:
        """Waits for launched steps and frees the device's memory."""
        while self._in_flight:
            self._in_flight.popleft()[1].result()
        self.runner.close()
