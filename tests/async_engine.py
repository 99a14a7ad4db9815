"""What the tests of `AsyncLLM` share: a tiny model, an event loop, and callers."""

from __future__ import annotations

import asyncio

import pytest
from tiny_model import write_model

from jaxllm import SamplingParams
from jaxllm.sampling_params import RequestOutputKind

pytest.importorskip("msgspec")

from jaxllm.engine.async_llm import AsyncLLM

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "device": "cpu"}
_, DELTA, FINAL = RequestOutputKind
LONG = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model. Only the first engine compiles; the others find its programs."""
    place = tmp_path_factory.mktemp("async")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(place / "cache"))
        patch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as here: programs of other machines are not found
        yield write_model(place / "tiny")


@pytest.fixture(scope="module")
def run():
    """Runs coroutines in one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


async def collect(engine: AsyncLLM, prompt, params, request_id: str) -> list:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def collect_rest(stream) -> list:
    return [output async for output in stream]
