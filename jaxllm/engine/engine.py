"""`LLMEngine`: text in, text out, one step at a time. What `LLM` and a server are loops over.

A request is checked whole before it enters: whatever is wrong with it is a ValueError of
`add_request`, and no other request notices.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from jaxllm.config import EngineConfig
from jaxllm.engine.answer_groups import AnswerGroups
from jaxllm.engine.core import EngineCore
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.stand_in_tokenizer import stand_in_tokenizer
from jaxllm.engine.tokenizer import load_tokenizer
from jaxllm.models.hub import resolve_model
from jaxllm.models.source import open_source
from jaxllm.outputs import RequestOutput
from jaxllm.parallel.mesh import check_divides, make_mesh, prepare_devices
from jaxllm.request import FinishReason, Request
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.sampling_params import MAX_SUPPRESSED_TOKEN_IDS, SamplingParams

logger = logging.getLogger(__name__)


class TextPrompt(TypedDict):
    """A prompt as vLLM's dictionaries have it."""

    prompt: str
    cache_salt: NotRequired[str]
    """Only prompts with the same salt share K/V in the cache."""


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


type Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


class LLMEngine:
    """A model, ready to take requests.

    Args:
        fields: those of `EngineConfig`.

    Raises:
        ValueError: the model, a field or their combination is not usable; the message says why.
        TypeError: a keyword that is no field.
    """

    def __init__(self, model: str, **fields: Any):
        started = time.perf_counter()
        config = EngineConfig(model, **fields)
        prepare_devices(config)
        with open_source(config) as source:
            mesh = make_mesh(config)
            check_divides(source.config, config.tensor_parallel_size)
            resolved = config.resolve(source.config, mesh.devices.flat[0].platform)
            self.model_config = source.config
            path = resolve_model(config.tokenizer) if config.tokenizer else source.tokenizer_path
            self.tokenizer = load_tokenizer(path) if path else stand_in_tokenizer(source.config.vocab_size)
            runner = ModelRunner(resolved, source.config, mesh)
            self.config = runner.config
            runner.start(source.load)
        self.core = EngineCore(runner)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.answer_groups = AnswerGroups()
        self._seeds = random.Random(config.seed)
        seconds, size = time.perf_counter() - started, runner.size
        logger.info("%s ready after %.1f s, K/V cache of %d tokens", model, seconds, size.num_tokens)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Enters a request.

        Args:
            request_id: any string no unfinished request has.
            prompt: text, or token ids.
            params: by default `SamplingParams()`.

        Raises:
            ValueError: the request cannot be served; nothing was entered.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r} is not a string")
        if not isinstance(params, SamplingParams | None):
            raise ValueError(f"params={params!r} is not a SamplingParams")
        text, request = self.make_request(request_id, prompt, params or SamplingParams())
        requests = (request, *request.children)
        for one in requests:
            if one.request_id in self.core.scheduler.requests or one.request_id in self.answer_groups:
                raise ValueError(f"request_id={one.request_id!r} is in use by an unfinished request: choose another")
        self.core.add_request(request)
        for one in requests:
            self.output_processor.add(one.request_id, text, list(one.prompt_ids), one.params)
        if request.children:
            self.answer_groups.add(request)

    def make_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> tuple[str | None, Request]:
        """The prompt's text, if it was text, and the checked request, with a child for each answer but the first."""
        text, token_ids = self._tokenize(prompt)
        self._check_prompt(token_ids)
        self._check_params(params)
        max_model_len = self.config.max_model_len
        assert isinstance(max_model_len, int), "unresolved defaults"
        request = Request(
            request_id,
            tuple(token_ids),
            params,
            frozenset(self.model_config.eos_token_ids),
            max_len=min(max_model_len, len(token_ids) + (params.max_tokens or max_model_len)),
            seed=self._make_seed(params, 0),
            cache_salt=_get_salt(prompt),
        )
        request.fork({f"{index}_{request_id}": self._make_seed(params, index) for index in range(1, params.n)})
        return text, request

    def step(self) -> list[RequestOutput]:
        """Runs the model once; returns the new state of every request that got a token or ended."""
        outputs, stopped = self.output_processor.process(self.core.step())
        for stop in stopped:
            self.core.abort(stop.request_id, FinishReason.STOP, stop.stop)
        return self.answer_groups.merge(outputs)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request where it is, with all of its answers; returns its last state, or None if it had ended before."""
        outputs: list[RequestOutput] = []
        for member in self.answer_groups.unfinished(request_id):
            self.core.abort(member, FinishReason.ABORT)
            if (output := self.output_processor.abort(member)) is not None:
                outputs.append(output)
        return next(iter(self.answer_groups.merge(outputs)), None)

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

    def _make_seed(self, params: SamplingParams, index: int) -> int:
        """Of the answer with this index."""
        return (self._seeds.getrandbits(64) if params.seed is None else params.seed + index) % 2**64

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        given = prompt
        if isinstance(given, dict):
            given = given.get("prompt", given.get("prompt_token_ids"))
        if isinstance(given, str):
            return given, self._encode(given)
        if not isinstance(given, Iterable):
            raise ValueError(
                f"prompt={prompt!r} is neither text, nor a list of token ids, nor a dictionary with one of them as "
                "'prompt' or 'prompt_token_ids'"
            )
        return None, list(given)

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt={text!r} is not valid Unicode: {error.reason} at {error.start}") from error
        return self.tokenizer.encode(text)

    def _check_prompt(self, token_ids: list[int]) -> None:
        limit, vocab_size = self.config.max_model_len, self.model_config.vocab_size
        assert isinstance(limit, int), "unresolved defaults"
        if not token_ids:
            raise ValueError("prompt is empty: give at least one token; the tokenizer adds none for an empty text")
        if len(token_ids) >= limit:
            raise ValueError(
                f"prompt has {len(token_ids)} tokens, but max_model_len={limit} holds prompt and answer together: "
                f"shorten it to {limit - 1} or less, or raise max_model_len"
            )
        for position, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt holds {token!r} at position {position}: token ids of this model are whole numbers "
                    f"from 0 to {vocab_size - 1}"
                )

    def _check_params(self, params: SamplingParams) -> None:
        if not params.min_tokens:
            return
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.model_config.eos_token_ids)}
        if len(stops) > MAX_SUPPRESSED_TOKEN_IDS:
            raise ValueError(
                f"min_tokens={params.min_tokens} has to hold back {len(stops)} stop tokens, "
                f"but at most {MAX_SUPPRESSED_TOKEN_IDS} can be: give fewer stop_token_ids, or min_tokens=0"
            )


def _get_salt(prompt: Prompt) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt={salt!r} is not valid: use a string that is not empty, or leave it away")
    return salt
