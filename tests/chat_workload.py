"""Conversations as a chat service sees them, and what they cost in K/V blocks over time. Pure Python, no device.

Two assistants, each with a system prompt of its own; every user has one conversation of five turns with one
of them, and each turn's prompt is all that was said before and a new message. Steps take the time they would on
an H200 with a model of 8 billion parameters: 7 ms, and 30 us for each token.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from doubles import prompt_request

from jaxllm.request import Request
from jaxllm.scheduling.plan import StepOutput
from jaxllm.scheduling.scheduler import Scheduler

NUM_TURNS = 5
VOCAB_SIZE = 50_000
STEP_SECONDS, TOKEN_SECONDS = 7e-3, 30e-6


@dataclass
class Conversation:
    """One user's: the tokens so far, and for each turn to come the message, the answer's length and the pause before."""

    name: str
    token_ids: list[int]
    turns: list[tuple[list[int], int, float]]


@dataclass
class Usage:
    """What a simulation used."""

    block_seconds: float = 0.0
    computed_tokens: int = 0
    seconds: float = 0.0


def make_conversations(num_users: int = 64, num_assistants: int = 2, seed: int = 0) -> list[Conversation]:
    """System prompts of 400 to 1,200 tokens, messages of 10 to 100, answers of 50 to 250, pauses of 1 to 15 s."""
    rng = random.Random(seed)

    def text(shortest: int, longest: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(shortest, longest))]

    systems = [text(400, 1200) for _ in range(num_assistants)]
    return [
        Conversation(
            f"user {user}",
            list(rng.choice(systems)),
            [(text(10, 100), rng.randint(50, 250), rng.uniform(1, 15)) for _ in range(NUM_TURNS)],
        )
        for user in range(num_users)
    ]


class Simulation:
    """Runs conversations on a scheduler; a user thinks, sends a message and reads the answer, turn after turn."""

    def __init__(self, scheduler: Scheduler, conversations: list[Conversation], seed: int = 1) -> None:
        self.scheduler = scheduler
        self.usage = Usage()
        self._answers = random.Random(seed)
        self._by_name = {conversation.name: conversation for conversation in conversations}
        self._sending = [(conversation.turns[0][2], conversation.name) for conversation in conversations]
        self._running: dict[str, Request] = {}
        heapq.heapify(self._sending)

    def run(self) -> Usage:
        """To the end of all conversations."""
        while self._sending or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished:
                self.usage.seconds = max(self.usage.seconds, self._sending[0][0])
            while self._sending and self._sending[0][0] <= self.usage.seconds:
                self._send(self._by_name[heapq.heappop(self._sending)[1]])
            self._step()
        return self.usage

    def _send(self, conversation: Conversation) -> None:
        message, answer_len, _ = conversation.turns.pop(0)
        conversation.token_ids += message
        request = prompt_request(conversation.name, conversation.token_ids, answer_len)
        self._running[conversation.name] = request
        self.scheduler.add(request)

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        seconds = STEP_SECONDS + TOKEN_SECONDS * plan.num_tokens
        self.usage.seconds += seconds
        self.usage.block_seconds += self.scheduler.kv.num_used_blocks * seconds
        self.usage.computed_tokens += plan.num_tokens
        token_ids = [self._answers.randrange(VOCAB_SIZE) for _ in plan.rows]
        for output in self.scheduler.update(
            plan, StepOutput([[token] for token in token_ids], [[0.0]] * len(token_ids))
        ):
            if output.finish_reason is not None:
                self._read(self._by_name[output.request_id], self._running.pop(output.request_id))

    def _read(self, conversation: Conversation, request: Request) -> None:
        conversation.token_ids += request.output_ids
        if conversation.turns:
            heapq.heappush(self._sending, (self.usage.seconds + conversation.turns[0][2], conversation.name))
