"""What a caller gets back. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import overload


class TokenIds(Sequence[int]):
    """The tokens that a growing list held when this was made: a list that cannot be changed, and costs no copy."""

    __slots__ = ("_length", "_source")
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, source: list[int]) -> None:
        self._source = source
        self._length = len(source)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._source, self._length)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(self._length)[index]
        return [self._source[place] for place in places] if isinstance(places, range) else self._source[places]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | TokenIds) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass
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

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's state after a step."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Tokens of the prompt whose K/V were in the cache already."""


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
