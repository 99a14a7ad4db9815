"""A request as the scheduler sees it: token ids in, token ids out.

There is no prefill phase and no decode phase: `num_computed` (tokens whose K/V are in the cache, or
will be once the launched steps ran) catches up with the request's length, a chunk or a token at a time.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from jaxllm.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """A stop string, a stop token or the end-of-sequence token came."""
    LENGTH = "length"
    """max_tokens or max_model_len was reached."""
    ABORT = "abort"
    """The caller gave up."""


@dataclass(eq=False)
class Request:
    """One prompt and its growing answer; known by its `request_id`, compared by identity."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    max_len: int
    """Prompt and answer together never grow past this many tokens (max_model_len, max_tokens)."""
    seed: int
    """Seed of this request's random numbers: its parameters' or one the engine drew."""
    arrival_time: float = field(default_factory=time.monotonic)
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_known: int = field(init=False)
    """Tokens the host knows: prompt and read answer. (Stored, like the next, as every step asks every request.)"""
    num_tokens: int = field(init=False)
    """Tokens that exist: known ones and those sampled by steps in flight."""
    stop_token_ids: frozenset[int] = field(init=False)
    """Every token that ends the answer, the end-of-sequence tokens included unless they are ignored."""
    seat: int | None = None
    num_slots: int = 0
    """Tokens that the K/V blocks it holds have room for; kept by the K/V manager."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the answer; None for the end-of-sequence token."""

    def __post_init__(self) -> None:
        stops = frozenset(self.params.stop_token_ids)
        self.stop_token_ids = stops if self.params.ignore_eos else stops | self.eos_token_ids
        self.num_known = self.num_tokens = len(self.prompt_ids) + len(self.output_ids)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Tokens sampled by launched steps whose results were not read yet."""
        return self.num_tokens - self.num_known

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def get_token_ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Known token ids of positions [start, stop)."""
        stop = self.num_known if stop is None else stop
        split = len(self.prompt_ids)
        return [*self.prompt_ids[start:stop], *self.output_ids[max(start - split, 0) : max(stop - split, 0)]]

    def append_token(self, token_id: int, logprob: float) -> None:
        """The oldest pending token was read; `num_tokens` counts it since its step was scheduled."""
        self.output_ids.append(token_id)
        self.output_logprobs.append(logprob)
        self.num_known += 1

    def num_required_blocks(self, block_size: int) -> int:
        """Blocks that hold every existing token's K/V."""
        return -(-self.num_tokens // block_size)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the answer with the tokens known now; pending ones are dropped."""
        self.num_tokens = self.num_known
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
