"""`LLMEngine`: text in, text out, one step at a time. What `LLM` and a server are loops over.

A request is checked whole before it enters: whatever is wrong with it is a ValueError of
`add_request`, and no other request notices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.answers import Answers
from jaxllm.engine.request_maker import Prompt, RequestMaker
from jaxllm.engine.stand_in_tokenizer import open_tokenizer
from jaxllm.engine.start import start_core
from jaxllm.logs import set_up_log
from jaxllm.model_config import ModelConfig
from jaxllm.outputs import RequestOutput
from jaxllm.request import FinishReason, Request
from jaxllm.runner.annotations import annotate
from jaxllm.sampling_params import SamplingParams


class LLMEngine:
    """A model, ready to take requests.

    Args:
        fields: those of `EngineConfig`.

    Raises:
        ValueError: the model, a field or their combination is not usable; the message says why.
        TypeError: a keyword that is no field.
    """

    def __init__(self, model: str, **fields: Any):
        set_up_log()
        self.core = start_core(EngineConfig(model, **fields), self._take_source)
        self.config = self.core.runner.config
        self.request_maker = RequestMaker(self.tokenizer, self.config, self.model_config)
        self.answers = Answers(self.tokenizer)

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of requests that bring none: what the model recommends, or `SamplingParams()`."""
        return self.request_maker.default_params

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Enters a request.

        Args:
            request_id: any string no unfinished request has.
            prompt: text, or token ids.
            params: by default `default_params`.
            priority: the lower, the sooner; other than 0 only where `scheduling_policy` heeds it.

        Raises:
            ValueError: the request cannot be served; nothing was entered.
        """
        text, request = self.make_request(request_id, prompt, params, priority)
        self.answers.add(text, request)
        try:
            self.core.add_request(request)
        except BaseException:
            self.answers.abort(request_id)
            raise

    def make_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> tuple[str | None, Request]:
        """What `add_request` would enter, and the prompt's text if it was text; raises what it would raise."""
        return self.request_maker.make(request_id, prompt, params, priority)

    def step(self) -> list[RequestOutput]:
        """Runs the model once; returns the new state of every request that got a token or ended."""
        token_outputs = self.core.step()
        try:
            with annotate("detokenize"):
                outputs, stopped = self.answers.process(token_outputs)
            for stop in stopped:
                self.core.abort(stop.request_id, FinishReason.STOP, stop.stop)
        except BaseException as error:  # Ctrl-C: answers would lack tokens from now on
            self.core.give_up(error)
            raise
        return outputs

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request where it is, with all of its answers; returns its last state, or None if it had ended before."""
        members, output = self.answers.abort(request_id)
        for member in members:
            self.core.abort(member, FinishReason.ABORT)
        return output

    def reset_prefix_cache(self) -> bool:
        """Forgets the K/V of finished requests; False and nothing changed while requests are running."""
        return self.core.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished

    def close(self) -> None:
        """Frees the devices; the engine is of no use afterwards."""
        self.core.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_source(self, model: ModelConfig, tokenizer: Path | None) -> None:
        self.model_config = model
        self.tokenizer = open_tokenizer(tokenizer, model)
