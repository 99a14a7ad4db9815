"""Whom a waiting request may push out, where the policy lets the urgent take the places of others.

Invariant: nobody has to go unless that makes room for the one that is next, in the step being planned; nor, as with
every preemption, before it sampled again since it was preempted last.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxllm.request import Request
from jaxllm.scheduling.kv_manager import KVManager
from jaxllm.scheduling.policy import AdmissionOrder
from jaxllm.scheduling.victims import VictimChoice

PATIENCE = 16
"""Steps that a request waits as the next one before others have to go for it. Where requests end all the time, it need
not wait as long, and nothing is computed twice: simulated, that served the urgent sooner, too."""


class Displacement:
    """Chooses who has to go, in the order of the victims' choice.

    Args:
        reserve: blocks that an admission leaves free.
        tokens: that a step may hold.
    """

    def __init__(self, victims: VictimChoice, kv: KVManager, reserve: int, tokens: int) -> None:
        self._victims = victims
        self._kv = kv
        self._reserve = reserve
        self._tokens = tokens
        self._next: Request | None = None
        self._num_steps = 0
        """That it was the next one, without being admitted."""

    def choose(self, waiting: AdmissionOrder, running: Collection[Request], has_free_seat: bool) -> list[Request]:
        """The running requests that have to go for `waiting.peek()`: none if it fits, or would not fit even so.

        To be asked once a step, before it is planned; `running` is in the order of admission.
        """
        urgent = waiting.peek()
        self._num_steps = self._num_steps + 1 if urgent is self._next else 1
        self._next = urgent
        if self._num_steps <= PATIENCE or urgent.num_pending > 0:
            return []
        self._num_steps = 0
        return self._choose(urgent, waiting, running, has_free_seat)

    def _choose(
        self, urgent: Request, waiting: AdmissionOrder, running: Collection[Request], has_free_seat: bool
    ) -> list[Request]:
        growing = sum(request.num_tokens > request.num_slots for request in running)  # by a block each in this step
        missing = self._kv.blocks_for(urgent.num_tokens) + growing + self._reserve - self._kv.num_free_blocks
        if has_free_seat and missing <= 0:
            return []
        tokens_before = sum(request.num_uncomputed for request in running)
        displaced: list[Request] = []
        for victim in reversed(self._victims.order(running)):
            if victim.num_tokens != victim.preempted_len and waiting.may_preempt(urgent, victim):
                displaced.append(victim)
                missing -= self._num_own_blocks(victim)
                tokens_before -= victim.num_uncomputed
                if missing <= 0 and tokens_before < self._tokens:
                    return self._who_must_go(displaced, -missing, self._tokens - 1 - tokens_before)
        return []

    def _who_must_go(self, displaced: list[Request], spare_blocks: int, spare_tokens: int) -> list[Request]:
        """Without those who may stay although the others go; somebody's seat is needed."""
        kept: list[Request] = []
        for number, victim in enumerate(displaced, 1):
            blocks, tokens = self._num_own_blocks(victim), victim.num_uncomputed
            if blocks <= spare_blocks and tokens <= spare_tokens and (kept or number < len(displaced)):
                spare_blocks, spare_tokens = spare_blocks - blocks, spare_tokens - tokens
            else:
                kept.append(victim)
        return kept

    def _num_own_blocks(self, request: Request) -> int:
        """Blocks that nobody else holds."""
        return sum(self._kv.pool.ref_count(block_id) == 1 for block_id in self._kv.block_ids(request))
