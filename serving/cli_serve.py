"""`jaxllm serve`: an OpenAI-compatible server of one model.

The invariant: standard output stays empty; what the server says goes to standard error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.logs import FORMAT, get_level
from jaxllm.serving.cli_commands import Serve
from jaxllm.serving.server import make_server
from jaxllm.serving.server_settings import KEYS_VARIABLE, ServerSettings


def run(command: Serve) -> None:
    config = command.engine.make_config()
    settings = _with_keys(command.server.make_settings())
    _set_up_log(settings.log_level or get_level("info"))
    engine = AsyncLLM(config, in_process=settings.in_process, engine_timeout=settings.engine_timeout)
    server = make_server(engine, config.model, settings)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.run_until_end())


def _with_keys(settings: ServerSettings) -> ServerSettings:
    """With the keys of the environment, if no others are given."""
    keys = tuple(key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip())
    return settings if settings.api_key else dataclasses.replace(settings, api_key=keys)


def _set_up_log(level: str) -> None:
    """Other libraries have more to say than an operator wants to read: their warnings only."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    logging.getLogger("jaxllm").setLevel(level.upper())
