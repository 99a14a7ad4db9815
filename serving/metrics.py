"""What Prometheus reads: requests as the server saw them, and the engine's own numbers at the moment of asking.

The invariant: names after the prefix, meanings and labels are vLLM's where vLLM has the metric.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.memory_use import resident_bytes
from jaxllm.outputs import RequestTimes
from jaxllm.sampling_params import SamplingParams

PREFIX, VLLM_PREFIX = "jaxllm:", "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 5)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_ANSWERS = (1, 2, 5, 10, 20)

_HISTOGRAMS: Sequence[tuple[str, str, Sequence[float]]] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN),
    ("request_time_per_output_token_seconds", "Mean time of a token after the first.", _BETWEEN_TOKENS),
    ("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE),
    ("request_queue_time_seconds", "From arrival until it is scheduled.", _WHOLE),
    ("request_prefill_time_seconds", "From being scheduled to the first token.", _WHOLE),
    ("request_decode_time_seconds", "From the first to the last token.", _WHOLE),
    ("request_inference_time_seconds", "From being scheduled to the last token.", _WHOLE),
    ("request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    ("request_generation_tokens", "Tokens of the answers to a prompt.", _TOKENS),
    ("request_params_max_tokens", "max_tokens of requests that have one.", _TOKENS),
    ("request_params_n", "Answers that are asked for.", _ANSWERS),
)

_ENGINE_GAUGES: Sequence[tuple[str, str, str]] = (
    ("num_requests_running", "num_running", "Requests that have a seat in the engine."),
    ("num_requests_waiting", "num_waiting", "Requests that wait for one."),
    ("num_requests_swapped", "num_swapped", "Requests whose K/V are in host memory."),
    ("cpu_cache_usage_perc", "host_cache_usage", "Share of host memory's blocks that swapped requests hold; 1 is all."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of the K/V cache's blocks in use; 1 is all."),
    ("padding_share", "padding_share", "Share of the computed tokens that nobody asked for; 1 is all."),
)
_ENGINE_COUNTERS: Sequence[tuple[str, str, str]] = (
    ("num_preemptions", "num_preemptions", "Requests that gave up their K/V for others."),
    ("prefix_cache_queries", "prefix_cache_queries", "Tokens that were looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Tokens that were found there."),
    ("cpu_prefix_cache_hits", "host_cache_hits", "Tokens among them that came from host memory."),
    ("swapped_out_bytes", "bytes_swapped_out", "Bytes of K/V copied to host memory."),
    ("swapped_in_bytes", "bytes_swapped_in", "Bytes of K/V copied back from host memory."),
    ("prompt_tokens", "num_prompt_tokens", "Tokens of prompts that were computed or found."),
    ("prompt_tokens_cached", "num_cached_prompt_tokens", "Tokens of prompts that were found in the prefix cache."),
    ("generation_tokens", "num_generated_tokens", "Tokens that were generated."),
    ("compiles_since_ready", "num_compiles_since_ready", "Programs compiled while serving, which should be none."),
    ("engine_steps", "num_steps", "Steps of the engine."),
    ("engine_step_seconds", "step_seconds", "Time that steps took, from planning until their tokens were read."),
    ("step_tokens", "num_step_tokens", "Tokens that steps were asked to compute."),
    ("padded_step_tokens", "num_padded_tokens", "Tokens that steps computed, padding included."),
)
_MEMORY_GAUGES: Sequence[tuple[str, str, str, str]] = (
    ("device_memory_used_bytes", "device", "device_bytes_in_use", "What the engine's process holds on a device."),
    ("device_memory_limit_bytes", "device", "device_bytes_limit", "What it may take there."),
)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._engine = _EngineMetrics(model_name)
        self._registry.register(self._engine)
        self._histograms = {
            name: self._make(Histogram, name, text, buckets=buckets).labels(**self._label)
            for name, text, buckets in _HISTOGRAMS
        }
        self._success = self._make(Counter, "request_success", "Answers by how they ended.", ("finished_reason",))
        self._rejections = self._make(Counter, "admission_rejections", "Requests refused as too many waited.")
        self._rejections.labels(**self._label)
        self._http = self._make(Counter, "http_requests", "Requests by route and status.", ("route", "status"))
        self._server_load = self._make(Gauge, "server_load", "Requests that are being answered.").labels(**self._label)
        self._between_tokens = _Gaps(model_name)
        self._registry.register(self._between_tokens)

    def _make[T](self, kind: Callable[..., T], name: str, text: str, labels: Sequence[str] = (), **options: Any) -> T:
        return kind(PREFIX + name, text, ("model_name", *labels), registry=self._registry, **options)

    def observe_gap(self, seconds: float) -> None:
        """Between two outputs of a stream."""
        self._between_tokens.observe(seconds)

    def observe_first(self, times: RequestTimes) -> None:
        """Something of the answers to a prompt came; known at once of a stream, also of one that nobody reads to its end."""
        scheduled, first = times.first_scheduled_time, times.first_token_time
        if scheduled is None or first is None:  # aborted before
            return
        self._observe("time_to_first_token_seconds", first - times.arrival_time)
        self._observe("request_queue_time_seconds", scheduled - times.arrival_time)
        self._observe("request_prefill_time_seconds", first - scheduled)

    def count_ends(self, reasons: Sequence[str]) -> None:
        """Answers ended for these reasons."""
        for reason in reasons:
            self._success.labels(**self._label, finished_reason=reason).inc()

    def observe_end(self, params: SamplingParams, num_prompt: int, num_generated: int, times: RequestTimes) -> None:
        """All answers to a prompt are finished."""
        self._observe("request_params_n", params.n)
        if params.max_tokens is not None:
            self._observe("request_params_max_tokens", params.max_tokens)
        self._observe("request_prompt_tokens", num_prompt)
        self._observe("request_generation_tokens", num_generated)
        scheduled, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
        if scheduled is None or first is None or last is None:  # aborted before
            return
        self._observe("e2e_request_latency_seconds", last - times.arrival_time)
        self._observe("request_decode_time_seconds", last - first)
        self._observe("request_inference_time_seconds", last - scheduled)
        per_answer = num_generated / params.n
        if per_answer > 1:
            self._observe("request_time_per_output_token_seconds", (last - first) / (per_answer - 1))

    def count_rejection(self) -> None:
        self._rejections.labels(**self._label).inc()

    def count_response(self, route: str, status: int) -> None:
        self._http.labels(**self._label, route=route, status=str(status)).inc()

    def show_config(self, config: EngineConfig) -> None:
        """The engine is ready, with these settings."""
        info = self._make(Info, "cache_config", "Settings of the K/V cache.").labels(**self._label)
        names = ("block_size", "gpu_memory_utilization", "num_gpu_blocks_override", "enable_prefix_caching", "dtype")
        info.info({name: str(getattr(config, name)) for name in names})

    def render(self, stats: EngineStats | None, server_load: int, with_vllm_names: bool) -> str:
        """The text for Prometheus.

        Args:
            stats: None where the engine is not ready.
            server_load: HTTP requests that are being answered.
            with_vllm_names: every metric a second time under vLLM's prefix.
        """
        self._engine.stats = stats
        self._server_load.set(server_load)
        text = generate_latest(self._registry).decode()
        return text + text.replace(PREFIX, VLLM_PREFIX) if with_vllm_names else text

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class _Gaps(Collector):
    """The times between outputs: a histogram that is added to for every token, and so does that at once."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0] * (len(_BETWEEN_TOKENS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BETWEEN_TOKENS, seconds)] += 1
        self._sum += seconds

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            PREFIX + "inter_token_latency_seconds", "Between two outputs of a stream.", labels=["model_name"]
        )
        bounds = [floatToGoString(bound) for bound in (*_BETWEEN_TOKENS, math.inf)]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric([self._model_name], buckets, self._sum)
        yield family


class _EngineMetrics(Collector):
    """The latest `EngineStats`; its counters are the engine's own."""

    def __init__(self, model_name: str) -> None:
        self.stats: EngineStats | None = None
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []  # not known to the registry beforehand

    def collect(self) -> Iterator[Metric]:
        resident = {"server": resident_bytes()}
        if self.stats is not None:
            resident["engine"] = self.stats.resident_bytes
        yield self._gauge("process_resident_memory_bytes", "Host memory of a process.", "process", resident)
        if self.stats is None:
            return
        for kind, metrics in ((GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTERS)):
            for name, field, text in metrics:
                family = kind(PREFIX + name, text, labels=["model_name"])
                family.add_metric([self._model_name], getattr(self.stats, field))
                yield family
        for name, label, field, text in _MEMORY_GAUGES:
            yield self._gauge(name, text, label, getattr(self.stats, field))

    def _gauge(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family
