"""From the engine core's token ids to what a caller reads: text, stop strings, outputs of the kind asked for.

The invariants: text that was shown never changes, so that a caller can stream it; no part of a stop string (unless
the request keeps them) or of an unfinished character is ever in it; the final text is the same for every kind of output; and after the end of a
request (a stop string included, which the core does not see) nothing more comes for it, whatever steps still in
flight bring. The work of a step does not grow with the answers, and text that nobody reads yet is not made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from jaxllm.engine.detokenizer import IncrementalDetokenizer, TextVocabulary
from jaxllm.engine.logprobs import LogprobWriter
from jaxllm.engine.stop_strings import StopStringMatcher
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import Beginning, CompletionOutput, Logprob, RequestOutput, TokenIds, TokenOutput
from jaxllm.request import FinishReason
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class StoppedRequest:
    """A request that a stop string ended here: the engine core still runs it and has to abort it."""

    request_id: str
    stop: str


class OutputProcessor:
    """The answers of all unfinished requests, as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        switches = itertools.product((True, False), repeat=2)
        self._vocabularies = {switch: TextVocabulary(tokenizer, *switch) for switch in switches}
        """By what is done about special tokens."""
        self._answers: dict[str, _Answer] = {}

    def __contains__(self, request_id: object) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._answers

    def add(self, request_id: str, prompt: str | None, prompt_ids: list[int], params: SamplingParams) -> None:
        """Register a request, before its first token can come; its outputs show `prompt_ids` as it is."""
        if request_id in self._answers:
            raise ValueError(f"request_id={request_id!r} belongs to a request that is not finished: use another one")
        switches = params.skip_special_tokens, params.spaces_between_special_tokens
        vocabulary = self._vocabularies[switches] if params.detokenize else None
        self._answers[request_id] = _Answer(request_id, prompt, prompt_ids, params, vocabulary)

    def process(self, token_outputs: Iterable[TokenOutput]) -> tuple[list[RequestOutput], list[StoppedRequest]]:
        """Take what a step did; returns the outputs that are due, and which requests a stop string ended.

        Tokens of requests that ended before are dropped.
        """
        outputs: list[RequestOutput] = []
        stopped: list[StoppedRequest] = []
        for token_output in token_outputs:
            answer = self._answers.get(token_output.request_id)
            if answer is None:
                continue
            answer.extend(token_output)
            if answer.has_output:
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
        vocabulary: TextVocabulary | None,
    ) -> None:
        self.request_id = request_id
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        """The stop string that ended the answer."""
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._min_tokens = params.min_tokens
        self._kind = params.output_kind
        self._keeps_stop = params.include_stop_str_in_output
        self._detokenizer = None if vocabulary is None else IncrementalDetokenizer(vocabulary, prompt_ids)
        self._matcher = StopStringMatcher(params.stop, self._keeps_stop) if params.stop else None
        self._writer = LogprobWriter(vocabulary)
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        """Only grows, as the token ids."""
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._text = ""
        """Of the answer; with DELTA of its next output."""
        self._token_ids: list[int] = []
        """Only grows: snapshots share it."""
        self._num_read = 0
        """Tokens given to the detokenizer."""
        self._num_reported = 0
        """Tokens of earlier outputs, with DELTA."""
        self._cumulative_logprob = 0.0
        self._num_cached_tokens = 0
        self._stop_reason: int | str | None = None

    @property
    def has_output(self) -> bool:
        """The caller wants to see the answer as it is now."""
        return self.finish_reason is not None or self._kind is not RequestOutputKind.FINAL_ONLY

    def extend(self, token_output: TokenOutput) -> None:
        """Add the tokens of a step, up to the one that completes a stop string."""
        reason = token_output.finish_reason
        self._num_cached_tokens = token_output.num_cached_tokens
        num_tokens = len(self._token_ids)
        if token_output.prompt_details is not None:
            self._prompt_logprobs = self._writer.write_prompt(self._prompt_ids, token_output.prompt_details)
        if self._matcher is not None:
            self._extend_to_stop_string(token_output)
        else:
            self._token_ids += token_output.new_token_ids
            for logprob in token_output.new_logprobs:
                self._cumulative_logprob += logprob
            if self._kind is not RequestOutputKind.FINAL_ONLY or reason is not None:
                self._read(len(self._token_ids) - (reason == FinishReason.STOP and not self._keeps_stop))
        if self._logprobs is not None and token_output.new_details is not None:
            new = self._token_ids[num_tokens:]
            self._logprobs += self._writer.write(new, token_output.new_details[: len(new)])
        if reason is not None or self.stop_string is not None:
            self.finish(reason, token_output.stop_reason)

    def finish(self, reason: str | None, stop_reason: int | str | None) -> None:
        """Show what was held, and end: for the reason given, unless the text ends at a stop string."""
        if reason == FinishReason.ABORT:
            self._read(len(self._token_ids))
        if self._detokenizer is not None and self.stop_string is None:
            self._show(self._detokenizer.flush())
        if self.stop_string is not None:
            reason, stop_reason = FinishReason.STOP, self.stop_string
        elif self._matcher is not None:
            self._text += self._matcher.flush()
        self.finish_reason = None if reason is None else str(reason)
        self._stop_reason = stop_reason

    def make_output(self) -> RequestOutput:
        """A snapshot, which does not change as the answer grows."""
        finished = self.finish_reason is not None
        logprobs, prompt_logprobs = self._logprobs, self._prompt_logprobs
        if self._kind is RequestOutputKind.DELTA:
            token_ids = self._token_ids[self._num_reported :]
            logprobs = None if logprobs is None else logprobs[self._num_reported :]
        else:
            token_ids = self._token_ids if finished else TokenIds(self._token_ids)
            logprobs = logprobs if finished or logprobs is None else Beginning(logprobs)
        completion = CompletionOutput(
            0, self._text, token_ids, self._cumulative_logprob, self.finish_reason, self._stop_reason, logprobs
        )
        if self._kind is RequestOutputKind.DELTA:
            self._num_reported = len(self._token_ids)
            self._text, self._prompt_logprobs = "", None
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_ids,
            [completion],
            finished,
            self._num_cached_tokens,
            prompt_logprobs,
        )

    def _extend_to_stop_string(self, token_output: TokenOutput) -> None:
        """Token by token: none comes after the one that completes a stop string."""
        num_left = len(token_output.new_token_ids)
        for token_id, logprob in zip(token_output.new_token_ids, token_output.new_logprobs, strict=True):
            num_left -= 1
            self._token_ids.append(token_id)
            self._cumulative_logprob += logprob
            is_stop_token = token_output.finish_reason == FinishReason.STOP and num_left == 0
            if not is_stop_token or self._keeps_stop:
                self._read(len(self._token_ids))
            if self.stop_string is not None:
                break

    def _read(self, end: int) -> None:
        """Make text of the tokens up to `end` that were not read yet."""
        start, self._num_read = self._num_read, end
        if self._detokenizer is not None and start < end:
            self._show(self._detokenizer.append(self._token_ids[start:end]))

    def _show(self, text: str) -> None:
        if self._matcher is not None and text:
            text = self._matcher.append(text, may_stop=len(self._token_ids) > self._min_tokens)
            self.stop_string = self._matcher.matched
        self._text += text
