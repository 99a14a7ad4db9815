"""The answers of all unfinished requests: what lies between an engine's token ids and its callers.

Invariant: `LLMEngine` and `AsyncLLM` both get their outputs here, so that a request reads the same from either.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.engine.answer_groups import AnswerGroups
from jaxllm.engine.output_processor import OutputProcessor, StoppedRequest
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import RequestOutput, TokenOutput
from jaxllm.request import Request


class Answers:
    """From the outputs of a step to those of requests, with their text and with all answers of n > 1."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._processor = OutputProcessor(tokenizer)
        self._groups = AnswerGroups()

    def add(self, text: str | None, request: Request) -> None:
        """Register a request and its children, before its first token can come; `text` is the prompt's.

        Raises:
            ValueError: one of the ids is that of an unfinished request.
        """
        members = (request, *request.children)
        for one in members:
            if one.request_id in self._processor or one.request_id in self._groups:
                raise ValueError(f"request_id={one.request_id!r} is in use by an unfinished request: choose another")
        prompt_ids = list(request.prompt_ids)  # one for all: it may be long, and they may be many
        for one in members:
            self._processor.add(one.request_id, text, prompt_ids, one.params)
        if request.children:
            self._groups.add(request)

    def process(self, token_outputs: Iterable[TokenOutput]) -> tuple[list[RequestOutput], list[StoppedRequest]]:
        """Take what a step did; returns the outputs that are due, and which requests the engine core has to abort."""
        outputs, stopped = self._processor.process(token_outputs)
        return self._groups.merge(outputs), stopped

    def abort(self, request_id: str) -> tuple[list[str], RequestOutput | None]:
        """End a request where it is, with all of its answers.

        Returns the ids that the engine core has to abort, and the last state; None if it had ended before.
        """
        members = self._groups.unfinished(request_id)
        outputs = [output for member in members if (output := self._processor.abort(member)) is not None]
        return members, next(iter(self._groups.merge(outputs)), None)
