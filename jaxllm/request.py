"""A request as the scheduler sees it: token ids in, token ids out.

There is no prefill phase and no decode phase: `num_computed` (tokens whose K/V are in the cache, or
will be once the launched steps ran) catches up with the request's length, a chunk or a token at a time.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxllm.outputs import TokenDetails
from jaxllm.sampling_params import SamplingParams, is_wide


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_FORK = "waiting for fork"
    """Another request computes the prompt they share; until then it stands in no queue."""
    SWAPPED = "swapped"
    """Its K/V are in host memory, and it waits to be admitted again."""
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """A stop string, a stop token or the end-of-sequence token came."""
    LENGTH = "length"
    """max_tokens or max_model_len was reached."""
    ABORT = "abort"
    """The caller gave up."""


@dataclass(eq=False, slots=True)
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
    cache_salt: str | None = None
    """Only requests with the same salt share K/V."""
    priority: int = 0
    """The lower, the sooner, where the scheduling policy heeds it."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of each spelling of its bad words."""
    parent: Request | None = None
    """The request this one is a fork of."""
    children: tuple[Request, ...] = ()
    """Forks that wait for this request to compute their prompt."""
    arrival_time: float = field(default_factory=time.monotonic)
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    prompt_details: list[TokenDetails] | None = None
    """Log-probabilities of its prompt, as far as they were read; None if nobody asks, or they were told."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Of its first blocks, as far as they were needed yet."""
    num_cached: int = 0
    """Tokens that were in the cache when it was admitted first."""
    first_scheduled_time: float | None = None
    """When it was admitted first, on the clock of `arrival_time`."""
    num_computed: int = 0
    num_known: int = field(init=False)
    """Tokens the host knows: prompt and read answer. (Stored, like the next, as every step asks every request.)"""
    num_tokens: int = field(init=False)
    """Tokens that exist: known ones and those sampled by steps in flight."""
    stop_token_ids: frozenset[int] = field(init=False)
    """Every token that ends the answer, the end-of-sequence tokens included unless they are ignored."""
    single_steps: bool = field(init=False)
    """Each of its steps is a call of its own: the host needs more of it than the tokens."""
    seat: int | None = None
    num_slots: int = 0
    """Tokens that it may compute before the K/V manager has to be asked, which keeps this number."""
    num_preemptions: int = 0
    preempted_len: int = 0
    """Tokens that existed when it was preempted last; 0 if it never was."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the answer; None for the end-of-sequence token."""

    def __post_init__(self) -> None:
        stops = frozenset(self.params.stop_token_ids)
        self.stop_token_ids = stops if self.params.ignore_eos else stops | self.eos_token_ids
        self.single_steps = is_wide(self.params.logprobs)
        if self.params.prompt_logprobs is not None and self.parent is None:
            self.prompt_details = []
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
        if start >= split:  # as nearly all calls have it
            return self.output_ids[start - split : stop - split]
        return [*self.prompt_ids[start:stop], *self.output_ids[: max(stop - split, 0)]]

    def append_tokens(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """The oldest pending tokens were read; `num_tokens` counts them since their step was scheduled."""
        self.output_ids += token_ids
        self.output_logprobs += logprobs
        self.num_known += len(token_ids)

    def fork(self, seeds: Mapping[str, int]) -> None:
        """Give a new request children: requests with these ids and seeds, and the same prompt."""
        self.children = tuple(self._make_child(request_id, seed) for request_id, seed in seeds.items())

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the answer with the tokens known now; pending ones are dropped."""
        self.num_tokens = self.num_known
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _make_child(self, request_id: str, seed: int) -> Request:
        child = dataclasses.replace(self, request_id=request_id, seed=seed, parent=self, children=())
        child.status = RequestStatus.WAITING_FOR_FORK
        child.output_ids, child.output_logprobs, child.block_hashes, child.prompt_details = [], [], [], None
        return child
