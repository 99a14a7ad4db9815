"""What a caller gets back. Field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CompletionOutput:
    """One answer, or as much of it as there is so far."""

    index: int
    text: str
    token_ids: list[int]
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
    """A request's state after a step; `outputs` holds everything generated so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False


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
