"""How fast a server answers, as its clients see it: any server with OpenAI's /v1/completions and vLLM's ignore_eos.

Invariant: the device is not touched, which the server may need all of; no prompt begins as another one does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxllm.bench.host import cpu_model
from jaxllm.bench.report import Figure, Report, own_version, round_to, show_number
from jaxllm.bench.serve_client import Client, Trace, closed_loop, connect, open_loop
from jaxllm.bench.settings import ServeSettings
from jaxllm.bench.workloads import random_prompt

KEY_VARIABLE = "JAXLLM_API_KEY"
"""Holds the key that the server wants: a report has the command line in it, which must not tell it."""

_PER_STREAM = 4
"""Requests per measurement for each in flight."""
_WARM_UP_TOKENS = 4
_MS = 1e3


def report_serve(url: str, settings: ServeSettings) -> Report:
    """Measures the server at an address.

    Raises:
        OSError: it cannot be reached, or answers no request.
    """
    return asyncio.run(_measure(url, settings))


async def _measure(url: str, settings: ServeSettings) -> Report:
    async with connect(url, os.environ.get(KEY_VARIABLE), settings.timeout) as client:
        model = settings.model or (await client.get("/v1/models"))["data"][0]["id"]
        figures: list[Figure] = []
        for number, rate in enumerate(settings.request_rate):
            figures += await _rate(client, rate, _Bodies(model, settings, number))
        for number, concurrency in enumerate(() if settings.request_rate else settings.concurrency):
            figures += await _streams(client, concurrency, _Bodies(model, settings, number))
    machine = {"device": "client", "platform": "cpu", "count": 1, "driver": None, "cpu": cpu_model()}
    machine |= {"jax": jax.__version__, "jaxllm": own_version()}
    return Report("serve", model, machine, {"url": url, "serve": dataclasses.asdict(settings)}, figures)


@dataclasses.dataclass(frozen=True)
class _Bodies:
    """The requests of one measurement."""

    model: str
    settings: ServeSettings
    number: int
    """Of the measurement: each has prompts of its own."""

    def make(self, count: int, output_len: int, part: int = 0) -> list[bytes]:
        """Args: part: 0, or 1 for other prompts."""
        first = 10**7 * (2 * self.number + part) + 10**9 * self.settings.seed
        return [self._body(first + index, output_len) for index in range(count)]

    def _body(self, seed: int, output_len: int) -> bytes:
        prompt = random_prompt(self.settings.input_len, self.settings.vocab_size, seed)
        body = {"model": self.model, "prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()


async def _streams(client: Client, concurrency: int, bodies: _Bodies) -> list[Figure]:
    settings = bodies.settings
    count = settings.num_prompts or _PER_STREAM * concurrency
    await closed_loop(client, bodies.make(concurrency, _WARM_UP_TOKENS, part=1), concurrency)
    traces = await closed_loop(client, bodies.make(count, settings.output_len), concurrency)
    return _figures(
        f"{concurrency} {'stream' if concurrency == 1 else 'streams'}", traces, {"concurrency": concurrency}
    )


async def _rate(client: Client, rate: float, bodies: _Bodies) -> list[Figure]:
    settings = bodies.settings
    count = settings.num_prompts or max(math.ceil(60 * rate), 1)
    await closed_loop(client, bodies.make(1, _WARM_UP_TOKENS, part=1), 1)
    traces = await open_loop(client, bodies.make(count, settings.output_len), rate, settings.seed)
    return _figures(f"{rate:g} requests/s", traces, {"request_rate": rate})


def _figures(level: str, traces: Sequence[Trace], details: dict[str, Any]) -> list[Figure]:
    """What a measurement came to; said on standard error when it is there."""
    good = [trace for trace in traces if trace.error is None]
    failed = [trace.error for trace in traces if trace.error is not None]
    if not good:
        raise OSError(f"{level}: no request was answered. The first one: {failed[0]}")
    seconds = max(trace.ended for trace in traces) - min(trace.sent for trace in traces)
    tokens = sum(trace.num_tokens for trace in good)
    details |= {"requests": len(traces), "failed": len(failed), "seconds": round_to(seconds), "output_tokens": tokens}
    details["requests_per_s"] = round_to(len(good) / seconds)
    if failed:
        details["first_failure"] = str(failed[0])
    figures = [Figure(f"{level}: output", round_to(tokens / seconds), "output tok/s", details)]
    figures += [
        _percentiles(f"{level}: TTFT", [trace.first for trace in good]),
        _percentiles(f"{level}: TPOT", [trace.per_token for trace in good]),
        _percentiles(f"{level}: ITL", [gap for trace in good for gap in trace.gaps] or [0.0]),
        _percentiles(f"{level}: E2E", [trace.whole for trace in good]),
    ]
    for figure in figures:
        print(f"{figure.name}: {show_number(figure.value)} {figure.unit}", file=sys.stderr, flush=True)
    return figures


def _percentiles(name: str, seconds: list[float]) -> Figure:
    """The median, with what else tells the distribution."""
    ordered = sorted(seconds)
    details: dict[str, Any] = {
        f"p{share}_ms": round_to(_quantile(ordered, share / 100) * _MS) for share in (50, 90, 95, 99)
    }
    details |= {"mean_ms": round_to(sum(ordered) / len(ordered) * _MS), "max_ms": round_to(ordered[-1] * _MS)}
    return Figure(name, details["p50_ms"], "ms", details)


def _quantile(ordered: list[float], share: float) -> float:
    """Between the two values around it."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
