"""What a caller gets back. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, overload


class Beginning[T](Sequence[T]):
    """What a growing list held when this was made: a list that cannot be changed, and costs no copy."""

    __slots__ = ("_length", "_source")
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, source: list[T]) -> None:
        self._source = source
        self._length = len(source)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return islice(self._source, self._length)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._length)[index]
        return [self._source[place] for place in places] if isinstance(places, range) else self._source[places]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | Beginning) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))


class TokenIds(Beginning[int]):
    """Token ids of an answer that goes on."""

    __slots__ = ()


@dataclass(slots=True)
class Logprob:
    """How likely a token was, under the model's raw distribution."""

    logprob: float
    rank: int
    """1 for the most likely token; equals of the token that came count as before it."""
    decoded_token: str | None = None
    """Its text, alone; None without detokenizing."""


class TokenDetails(NamedTuple):
    """What is known of the choice of one token, if its request asked for log-probabilities."""

    logprob: float
    rank: int
    """Tokens that are as likely or more, this one included."""
    top_token_ids: list[int]
    """The most likely ones, as many as were asked for, in order."""
    top_logprobs: list[float]


@dataclass(slots=True)
class CompletionOutput:
    """One answer, or as much of it as the request's `output_kind` asks for."""

    index: int
    text: str
    token_ids: Sequence[int]
    """A list once the answer is finished."""
    cumulative_logprob: float
    """Sum of the chosen tokens' log-probabilities under the model's raw distribution."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while it is running."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the end-of-sequence token."""
    logprobs: Sequence[dict[int, Logprob]] | None = None
    """For each token, by token id: itself and the most likely ones. None unless the request asks for them."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestTimes:
    """When what happened to a request, in seconds of `time.monotonic`; None: not yet."""

    arrival_time: float
    """The caller came; its prompt is not tokenized yet."""
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    """The newest tokens of this output came."""


@dataclass(slots=True)
class RequestOutput:
    """A request's state after a step."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Tokens of the prompt whose K/V were in the cache already."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Of the prompt's tokens, as `CompletionOutput.logprobs`; None for its first. With DELTA in the first output only."""
    metrics: RequestTimes | None = None
    """From `AsyncLLM` only."""


@dataclass
class BeamSearchSequence:
    """One answer that a beam search found."""

    tokens: list[int]
    """The prompt's and its own."""
    cum_logprob: float
    """Sum of its own tokens' log-probabilities."""
    score: float
    """That sum by the power of the number of tokens that `length_penalty` is."""
    text: str | None = None
    """Of its own tokens."""
    finish_reason: str | None = None
    """"stop" or "length"."""


@dataclass
class BeamSearchOutput:
    """What a beam search found for one prompt."""

    sequences: list[BeamSearchSequence]
    """Best first, `beam_width` at the most."""


@dataclass(slots=True)
class TokenOutput:
    """What one step did for one request: all that crosses from the engine core to the output processor.

    Not frozen for the time it takes to make one per request and step; nobody changes it.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    new_logprobs: tuple[float, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    new_details: list[TokenDetails] | None = None
    """Of the new tokens, if the request asks for log-probabilities."""
    prompt_details: list[TokenDetails] | None = None
    """Of the prompt's tokens but the first, with the first token of an answer whose request asks for them."""
