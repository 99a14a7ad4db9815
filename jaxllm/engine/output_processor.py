"""From the engine core's token ids to what a caller reads: text, stop strings, cumulative outputs.

The invariants: each text of a request is the beginning of its next one, so that a caller can stream the difference;
no part of a stop string or of an unfinished character is ever in it; and after the end of a request (a stop string
included, which the core does not see) nothing more comes for it, whatever steps still in flight bring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxllm.engine.detokenizer import IncrementalDetokenizer
from jaxllm.engine.stop_strings import StopStringMatcher
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import CompletionOutput, RequestOutput, TokenOutput
from jaxllm.request import FinishReason
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class StoppedRequest:
    """A request that a stop string ended here: the engine core still runs it and has to abort it."""

    request_id: str
    stop: str


class OutputProcessor:
    """The answers of all unfinished requests, as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answer] = {}

    def add(self, request_id: str, prompt: str | None, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Register a request, before its first token can come."""
        if request_id in self._answers:
            raise ValueError(f"request_id={request_id!r} belongs to a request that is not finished: use another one")
        detokenizer = IncrementalDetokenizer(self._tokenizer, prompt_ids)
        self._answers[request_id] = _Answer(request_id, prompt, list(prompt_ids), params, detokenizer)

    def process(self, token_outputs: Iterable[TokenOutput]) -> tuple[list[RequestOutput], list[StoppedRequest]]:
        """Take what a step did; returns the requests' new states, and which of them a stop string ended.

        Tokens of requests that ended before are dropped.
        """
        outputs: list[RequestOutput] = []
        stopped: list[StoppedRequest] = []
        for token_output in token_outputs:
            answer = self._answers.get(token_output.request_id)
            if answer is None:
                continue
            answer.extend(token_output)
            outputs.append(self._report(answer))
            if answer.stop_string is not None and token_output.finish_reason is None:
                stopped.append(StoppedRequest(answer.request_id, answer.stop_string))
        return outputs, stopped

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request where it is; returns its last state, or None if it had ended before."""
        answer = self._answers.get(request_id)
        if answer is None:
            return None
        answer.finish(FinishReason.ABORT, None)
        return self._report(answer)

    def _report(self, answer: _Answer) -> RequestOutput:
        if answer.finish_reason is not None:
            del self._answers[answer.request_id]
        return answer.make_output()


class _Answer:
    """One request's answer so far."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer,
    ) -> None:
        self.request_id = request_id
        self.finish_reason: str | None = None
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._min_tokens = params.min_tokens
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(params.stop)
        self._text = ""
        self._token_ids: list[int] = []
        self._cumulative_logprob = 0.0
        self._stop_reason: int | str | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    def extend(self, token_output: TokenOutput) -> None:
        """Add the tokens of a step, up to the one that completes a stop string."""
        num_new = len(token_output.new_token_ids)
        for index, token_id in enumerate(token_output.new_token_ids):
            self._token_ids.append(token_id)
            self._cumulative_logprob += token_output.new_logprobs[index]
            is_stop_token = token_output.finish_reason == FinishReason.STOP and index == num_new - 1
            if not is_stop_token:
                self._show(self._detokenizer.append(token_id))
            if self.stop_string is not None:
                break
        if self.stop_string is not None or token_output.finish_reason is not None:
            self.finish(token_output.finish_reason, token_output.stop_reason)

    def finish(self, reason: str | None, stop_reason: int | str | None) -> None:
        """Show what was held, and end: for the reason given, unless the text ends at a stop string."""
        if self.stop_string is None:
            self._show(self._detokenizer.flush())
        if self.stop_string is None:
            self._text += self._matcher.flush()
        else:
            reason, stop_reason = FinishReason.STOP, self.stop_string
        self.finish_reason = None if reason is None else str(reason)
        self._stop_reason = stop_reason

    def make_output(self) -> RequestOutput:
        """A snapshot, which does not change as the answer grows."""
        completion = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=self._token_ids.copy(),
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        finished = self.finish_reason is not None
        return RequestOutput(self.request_id, self._prompt, self._prompt_ids, [completion], finished)

    def _show(self, text: str) -> None:
        if text:
            may_stop = len(self._token_ids) > self._min_tokens
            self._text += self._matcher.append(text, may_stop)
