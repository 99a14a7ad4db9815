"""What can be chosen about a benchmark: plain values, from which the command line makes its flags.

Invariant: the defaults are the measurements that the README's table is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxllm.profiling.ceilings import H200

WorkloadName = Literal["nano", "shared-prefix", "prefill"]


@dataclass(frozen=True)
class LatencySettings:
    """What `jaxllm bench latency` measures."""

    rows: tuple[int, ...] = (1, 64, 256)
    """Numbers of requests that run at once, one measurement each."""
    context: int = 512
    """Tokens of each of their prompts."""
    steps: int = 32
    """Decode steps that are timed per number of rows, once all rows decode."""
    prompt_len: int = 128
    """Tokens of the prompt that one stream and the time to first token are measured with."""
    rounds: int = 5
    """Prompts whose time to first token is measured, one after the other."""

    def __post_init__(self) -> None:
        _check_size(self, "rows", "context", "steps", "prompt_len", "rounds")


@dataclass(frozen=True)
class ProfileSettings:
    """What `jaxllm profile` records."""

    rows: int = 1
    """Requests that decode at once."""
    context: int = 512
    """Tokens of each of their prompts."""
    steps: int = 32
    """Decode steps that are recorded, once all rows decode; as many are timed before, with nothing recorded."""
    output: str = "profile"
    """Folder to record in, for Perfetto and XProf; it may hold other profiles."""

    def __post_init__(self) -> None:
        _check_size(self, "rows", "context", "steps")


@dataclass(frozen=True)
class ThroughputSettings:
    """What `jaxllm bench throughput` measures."""

    workload: WorkloadName = "nano"
    """nano: nano-vllm's benchmark, prompts and answers of 100 to 1024 tokens. shared-prefix: prompts that begin alike.
    prefill: prompts with one token of answer."""
    sampled: bool = False
    """In nano, sample with temperature 0.8, top_p 0.95 and top_k 50 instead of greedily."""
    num_prompts: int = 256
    """Requests."""
    longest: int = 1024
    """In nano, the most tokens of a prompt and of an answer."""
    prefix_len: int = 2048
    """In shared-prefix, tokens that all prompts begin with."""
    own_len: int = 128
    """In shared-prefix, tokens of each prompt behind the prefix."""
    output_len: int = 64
    """In shared-prefix, tokens of each answer."""
    prefill_len: int = 512
    """In prefill, tokens of each prompt."""

    def __post_init__(self) -> None:
        _check_size(self, "num_prompts", "longest", "prefix_len", "own_len", "output_len", "prefill_len")


@dataclass(frozen=True)
class StartupSettings:
    """What `jaxllm bench startup` measures."""

    rounds: int = 3
    """Pairs of starts, each with caches of its own: the first finds them empty, the second warm."""
    eager: bool = False
    """Also start with --enforce-eager."""

    def __post_init__(self) -> None:
        _check_size(self, "rounds")


class Extent(NamedTuple):
    """How much a decode step attends to."""

    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.context}"

    @classmethod
    def parse(cls, text: str) -> Extent:
        """Of "64x4096".

        Raises:
            ValueError: it is not written so.
        """
        rows, _, context = text.partition("x")
        if not rows.isdecimal() or not context.isdecimal() or 0 in (int(rows), int(context)):
            raise ValueError(f"{text!r} is not rows x context: write 64x4096")
        return cls(int(rows), int(context))


class Mixture(NamedTuple):
    """What a step attends to in which prompts begin beside requests that decode."""

    rows: int
    context: int
    prompts: int
    prompt_len: int

    @classmethod
    def parse(cls, text: str) -> Mixture:
        """Of "192x1024+8x512".

        Raises:
            ValueError: it is not written so.
        """
        decode, plus, prompts = text.partition("+")
        if not plus:
            raise ValueError(f"{text!r} is not rows x context + prompts x tokens: write 192x1024+8x512")
        return cls(*Extent.parse(decode), *Extent.parse(prompts))


@dataclass(frozen=True)
class KernelSettings:
    """What `jaxllm bench kernels` measures."""

    decode: tuple[Extent, ...] = (Extent(64, 4096), Extent(256, 1024), Extent(8, 8192))
    """Attention of decode steps: rows x tokens of context."""
    chunk: tuple[int, ...] = (2048, 8192)
    """Attention of a prompt's first chunk: its tokens."""
    mixed: tuple[Mixture, ...] = (Mixture(192, 1024, 8, 512),)
    """Attention of decode steps that prompts begin in: rows x tokens of context + prompts x their tokens."""
    num_heads: int = 32
    """Query heads."""
    num_kv_heads: int = 8
    """K/V heads."""
    head_dim: int = 128
    """Numbers in a head."""
    block_size: int = 16
    """Tokens in a block of the K/V cache."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of queries, keys and values."""
    backend: Literal["auto", "xla", "pallas"] = "auto"
    """Implementation of attention and of the sampler; auto is what an engine takes on this device."""
    sampler_rows: int = 256
    """Rows the sampler is measured with."""
    vocab_size: int = 128256
    """Tokens of the vocabulary the sampler is measured with."""
    read_ceiling: float = H200.read
    """TB/s at which the device reads its memory; shares are of this. The default is an H200's, measured."""
    compute_ceiling: float = H200.compute
    """TFLOP/s of matrix products; shares are of this. The default is an H200's in bfloat16, measured."""
    seed: int | None = None
    """Seed of the inputs; by default another one every time."""


@dataclass(frozen=True)
class ServeSettings:
    """What `jaxllm bench serve` sends, and how fast."""

    concurrency: tuple[int, ...] = (1, 16, 64)
    """Numbers of requests in flight, one measurement each: a new one is sent when one is answered."""
    request_rate: tuple[float, ...] = ()
    """Instead, requests per second that arrive at random (a Poisson process), whatever is in flight."""
    num_prompts: int | None = None
    """Requests per measurement; by default 4 for each in flight, or a minute's."""
    input_len: int = 512
    """Tokens of each prompt."""
    output_len: int = 256
    """Tokens of each answer."""
    vocab_size: int = 10000
    """Prompts are made of token ids below this number."""
    model: str | None = None
    """Name of the model; by default the first that the server lists."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    seed: int = 0
    """Seed of prompts and of arrivals."""

    def __post_init__(self) -> None:
        _check_size(self, "num_prompts", "input_len", "output_len", "vocab_size", "concurrency")
        if any(not 0 < rate < float("inf") for rate in self.request_rate):
            raise ValueError(f"request_rate={self.request_rate} has a rate that is not above 0")


def _check_size(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if any(number is not None and number < 1 for number in numbers):
            raise ValueError(f"{name}={value} is too small: use 1 or above")
