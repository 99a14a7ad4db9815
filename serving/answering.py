"""The way every request for text goes once it is checked: into the engine, and back whole or as a stream.

The invariant: what the log says of a request has no text of its prompt or answer, unless the settings want it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.outputs import RequestOutput
from jaxllm.serving.errors import json_response
from jaxllm.serving.generation import Generation, until_gone
from jaxllm.serving.protocol import GenerationRequest
from jaxllm.serving.streaming import AnswerWriter, EventStream
from jaxllm.serving.usage import UsageCounter

logger = logging.getLogger(__name__)


def new_id(prefix: str, asked: str | None) -> str:
    """The id of a response: what the request asks for, or one that nobody has."""
    return f"{prefix}-{asked or uuid.uuid4().hex}"


async def answer(
    request: Request, generation: Generation, writer: AnswerWriter, body: GenerationRequest
) -> Response | EventStream:
    """The response, whole or as a stream; raises what `Generation.run` raises."""
    counter = UsageCounter()
    # The line of the request in the log is written when it ended.
    request.state.counter = counter
    request.state.user = body.user
    if generation.service.settings.log_prompts:
        _log_prompts(generation)
    if body.stream:
        return EventStream(generation, writer, counter)
    outputs = await until_gone(request.receive, collect(generation, counter))
    if generation.service.settings.log_prompts:
        for output in outputs:
            texts = [one.text for one in output.outputs]
            logger.info("%s answers: %r", output.request_id, texts)
    return json_response(writer.whole(outputs, counter.usage))


async def collect(generation: Generation, counter: UsageCounter) -> Sequence[RequestOutput]:
    """The finished output of every prompt."""
    finished: dict[int, RequestOutput] = {}

    async def keep(index: int, output: RequestOutput) -> None:
        counter.note(index, output)
        finished[index] = output

    await generation.run(keep)
    return [finished[index] for index in range(len(generation.prompts))]


def _log_prompts(generation: Generation) -> None:
    for index, token_ids in enumerate(generation.prompts):
        text = generation.service.tokenizer.decode(token_ids, skip_special_tokens=False)
        logger.info("%s prompt: %r %s", generation.engine_id(index), text, generation.params)
