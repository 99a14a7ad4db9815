"""Who has to go first when running requests need more blocks than there are.

Invariant: a choice is an order of the running requests, those that keep their places longest first. Steps are planned
from its front and victims taken from its end, so that nobody is preempted who has a row in the plan being built.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from jaxllm.request import Request


class VictimChoice(Protocol):
    """Orders the running requests; asked in steps that may be short of blocks, so O(n log n) is fine."""

    def order(self, running: Collection[Request]) -> list[Request]:
        """All of them, the first victim last.

        Args:
            running: in the order of their admission.
        """
        ...


class LastJoined:
    """Who was admitted last goes first: those before it are done sooner."""

    def order(self, running: Collection[Request]) -> list[Request]:
        return list(running)


class LeastProgress:
    """Who has the fewest tokens computed goes first, the last joined among equals: the least work is lost."""

    def order(self, running: Collection[Request]) -> list[Request]:
        return sorted(running, key=lambda request: -request.num_computed)


class LowestPriority:
    """The highest `Request.priority` goes first, the last joined among equals."""

    def order(self, running: Collection[Request]) -> list[Request]:
        return sorted(running, key=lambda request: request.priority)
