"""Requests that wait for another one to compute the prompt they share (n > 1).

Invariant: a child stands in no queue before its parent's prompt was computed by earlier steps, or the parent
is gone. Then it goes before all who wait, as it came with its parent; no child is lost.
"""

from __future__ import annotations

from jaxllm.request import Request, RequestStatus
from jaxllm.scheduling.policy import AdmissionOrder


class Forks:
    """Parents whose children are due soon."""

    def __init__(self) -> None:
        self._parents: dict[Request, None] = {}

    def watch(self, parent: Request) -> None:
        """A request with children was seated, or ended before that."""
        self._parents[parent] = None

    def release(self, waiting: AdmissionOrder) -> None:
        """Let children wait for admission if their parent's prompt was computed; called before a step is planned."""
        for parent in [parent for parent in self._parents if _is_due(parent)]:
            del self._parents[parent]
            for child in reversed(parent.children):
                if child.status is RequestStatus.WAITING_FOR_FORK:
                    child.status = RequestStatus.WAITING
                    waiting.push_front(child)
            parent.children = ()


def _is_due(parent: Request) -> bool:
    return parent.is_finished or parent.num_computed >= parent.prompt_len
