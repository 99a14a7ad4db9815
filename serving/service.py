"""What every route works with: the engine, the settings, who is being answered, and what is measured.

The invariant: nothing is asked of an engine that is not ready.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.serving.admission import Admission
from jaxllm.serving.errors import ApiError, bad_request, unavailable
from jaxllm.serving.metrics import Metrics
from jaxllm.serving.protocol import Head
from jaxllm.serving.server_settings import ServerSettings

VERSION = metadata.version("jaxllm")


class Service:
    """One model, served.

    Args:
        engine: started or not; until it is ready, routes answer 503.
        model: as it was named on the command line.

    Raises:
        ValueError: a setting is not usable.
    """

    def __init__(self, engine: AsyncLLM, model: str, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.started = int(time.time())
        self.model_path = model
        self.model_names = settings.served_model_name or (model,)
        self.admission = Admission(settings.max_waiting_requests)
        self.metrics = Metrics(self.model_name)
        self.chat_template_kwargs = _parse_object("default_chat_template_kwargs", settings.default_chat_template_kwargs)
        self._chat_template = Path(settings.chat_template).read_text("utf-8") if settings.chat_template else None
        self._tokenizer: Tokenizer | None = None
        self._fingerprint: str | None = None

    @property
    def model_name(self) -> str:
        """The name that answers have."""
        return self.model_names[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """With the chat template that the settings want."""
        if self._tokenizer is None:
            own = self.engine.tokenizer
            self._tokenizer = own.with_chat_template(self._chat_template) if self._chat_template else own
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        limit = self.engine.config.max_model_len
        assert isinstance(limit, int), "unresolved defaults"
        return limit

    @property
    def fingerprint(self) -> str:
        """Changes if answers under a seed may: with the program's version and the engine's settings."""
        if self._fingerprint is None:
            digest = hashlib.sha256(repr((VERSION, self.engine.config)).encode()).hexdigest()
            self._fingerprint = f"jaxllm-{VERSION}-{digest[:8]}"
        return self._fingerprint

    def make_head(self, request_id: str) -> Head:
        """What a response to a request that comes now begins with."""
        return {
            "id": request_id,
            "created": int(time.time()),
            "model": self.model_name,
            "system_fingerprint": self.fingerprint,
        }

    def check_ready(self) -> None:
        """Raises ApiError unless requests can be taken."""
        if self.engine.dead_error is not None:
            raise unavailable(f"the engine cannot go on: {self.engine.dead_error}")
        if self.admission.is_draining:
            raise unavailable("the server is shutting down")
        if not self.engine.is_ready:
            raise unavailable("the model is being loaded", retry_after=5)
        seats = self.engine.config.max_num_seqs
        assert seats, "unresolved defaults"
        self.admission.max_running = seats

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless a request may call the model so."""
        if name is not None and name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            message = f"The model {name!r} does not exist: this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_text(self, text: str, param: str) -> None:
        """Raises ApiError if a prompt cannot fit, however it is tokenized: that would take memory and time."""
        least = math.ceil(len(text) / self._longest_token)
        if least >= self.max_model_len:
            raise self._too_long(f"at least {least}", least, param)

    def check_prompt(self, token_ids: list[int], param: str) -> None:
        """Raises ApiError unless a prompt and an answer fit."""
        if len(token_ids) >= self.max_model_len:
            raise self._too_long(str(len(token_ids)), len(token_ids), param)

    @cached_property
    def _longest_token(self) -> int:
        """Characters."""
        tokenizer = self.engine.tokenizer
        return max(len(tokenizer.id_to_token(index) or "") for index in range(tokenizer.vocab_size)) or 1

    def _too_long(self, count: str, num_tokens: int, param: str) -> ApiError:
        return bad_request(
            f"This model's maximum context length is {self.max_model_len} tokens, and one is needed for the answer. "
            f"However, your prompt has {count} tokens: shorten it by {num_tokens - self.max_model_len + 1}",
            param=param,
            code="context_length_exceeded",
        )


def _parse_object(name: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f'{name}={text!r} is not a JSON object: write {{"name": value}}')
    return value
