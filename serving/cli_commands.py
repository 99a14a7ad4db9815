"""What can be typed after `jaxllm`: one frozen dataclass per subcommand, from which tyro makes flags and help.

The invariant: no flag is written down twice. Engine and sampling flags are the fields of `EngineConfig` and
`SamplingParams`, with their defaults, topics and docstrings; only what differs on a command line is said here.
This module imports nothing heavy, so that help and mistakes are answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, Suppress, UseAppendAction, arg, subcommand

from jaxllm.bench.settings import (
    Extent,
    KernelSettings,
    LatencySettings,
    Mixture,
    ProfileSettings,
    ServeSettings,
    StartupSettings,
    ThroughputSettings,
    WorkloadName,
)
from jaxllm.config import ENGINE_TOPICS, EngineConfig
from jaxllm.sampling_params import SAMPLING_TOPICS, RequestOutputKind, SamplingParams
from jaxllm.serving.cli_flags import Unchecked, by_topic, commas, get_fields, pairs
from jaxllm.serving.cli_small_commands import CommandFlags, Convert, Env, Models, Pull, Top
from jaxllm.serving.server_settings import SERVER_TOPICS, ServerSettings


@dataclass(frozen=True)
class EngineFlags(EngineConfig):
    """How the model is loaded and run."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    # Functions have no flag; where to import them from has. Given once per value, as a list would swallow prompts.
    logits_processors: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="MODULE:FUNCTION")] = ()
    scheduling_policy: Annotated[str, arg(metavar="fcfs|priority|sjf|dynamic|MODULE:CLASS")] = "fcfs"

    def __post_init__(self) -> None:
        """No check here, where the message would name tyro's insides: `make_config` checks."""

    def make_config(self) -> EngineConfig:
        return EngineConfig(**get_fields(self))


@dataclass(frozen=True)
class SamplingFlags(SamplingParams):
    """How an answer is sampled and when it ends."""

    # `--seed` is the engine's, and makes a whole run repeatable; this one is every request's own.
    seed: Annotated[int | None, arg(name="sampling-seed", metavar="INT")] = None
    max_tokens: int | None = 256
    # Given once per value: a flag that takes many values would swallow the prompts behind it.
    stop: UseAppendAction[tuple[str, ...]] = ()
    stop_token_ids: UseAppendAction[tuple[int, ...]] = ()
    bad_words: UseAppendAction[tuple[str, ...]] = ()
    allowed_token_ids: Annotated[tuple[int, ...] | None, commas(int)] = None
    logit_bias: Annotated[dict[int, float] | None, pairs(int, float, "TOKEN:BIAS")] = None
    # A matter between the engine and its caller, which is the command.
    output_kind: Suppress[RequestOutputKind] = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        """No check here, where the message would name tyro's insides: `make_params` checks."""

    def make_params(self) -> SamplingParams:
        return SamplingParams(**get_fields(self))


@dataclass(frozen=True)
class ChatSamplingFlags(SamplingFlags):
    """How an answer is sampled and when it ends."""

    max_tokens: int | None = 512


@dataclass(frozen=True)
class ServerFlags(Unchecked[ServerSettings], ServerSettings):
    """How the server is reached, and what it takes."""

    # Given once per value: a flag that takes many values would swallow the model behind it.
    served_model_name: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    api_key: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY")] = ()
    allowed_origins: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ORIGIN")] = ()


@dataclass(frozen=True)
class FileFlags:
    """Where prompts come from and answers go."""

    input: Annotated[str | None, arg(metavar="FILE")] = None
    """File of prompts, by default standard input. One text a line; or JSONL, where a row has "prompt", or "messages" for
    the chat template, and may have "request_id" and sampling parameters of its own, as "max_tokens"."""
    input_format: Literal["auto", "text", "jsonl"] = "auto"
    """Format of the prompts. auto: JSONL if FILE is named so, or if the first line begins with {; else text."""
    chat: FlagCreatePairsOff[bool] = False
    """Put each prompt to the model as a user's message, in its chat template."""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """File to write the answers to, by default standard output."""
    output_format: Literal["auto", "text", "jsonl"] = "auto"
    """Format of the answers. jsonl: request_id, index, prompt, text, token_ids, finish_reason and usage in a row.
    auto: JSONL if FILE is named so; else text."""


@dataclass(frozen=True)
class Prompts:
    """The prompts that are written on the command line: behind the model, so in a class of their own."""

    texts: Annotated[Positional[tuple[str, ...]], arg(metavar="[PROMPT ...]", help_behavior_hint="")] = ()
    """Texts to complete. Without any, --input is read, or standard input."""


@dataclass(frozen=True)
class LatencyFlags(Unchecked[LatencySettings], LatencySettings):
    """What is measured."""

    rows: Annotated[tuple[int, ...], commas(int)] = LatencySettings.rows


@dataclass(frozen=True)
class StartupFlags(Unchecked[StartupSettings], StartupSettings):
    """What is measured."""


@dataclass(frozen=True)
class KernelFlags(KernelSettings):
    """What is measured."""

    decode: Annotated[tuple[Extent, ...], commas(Extent.parse, metavar="ROWSxCONTEXT")] = KernelSettings.decode
    chunk: Annotated[tuple[int, ...], commas(int)] = KernelSettings.chunk
    mixed: Annotated[tuple[Mixture, ...], commas(Mixture.parse, metavar="ROWSxCONTEXT+PROMPTSxTOKENS")] = (
        KernelSettings.mixed
    )


@dataclass(frozen=True)
class ProfileFlags(Unchecked[ProfileSettings], ProfileSettings):
    """What is recorded."""

    output: Annotated[str, arg(metavar="FOLDER")] = ProfileSettings.output


@dataclass(frozen=True)
class LoadFlags(Unchecked[ServeSettings], ServeSettings):
    """What is sent, and how fast."""

    concurrency: Annotated[tuple[int, ...], commas(int)] = ServeSettings.concurrency
    request_rate: Annotated[tuple[float, ...], commas(float, metavar="R")] = ServeSettings.request_rate


@dataclass(frozen=True)
class ThroughputFlags(Unchecked[ThroughputSettings], ThroughputSettings):
    """What is measured."""


@dataclass(frozen=True)
class ThroughputSizes(ThroughputFlags):
    """How large the workloads are."""

    workload: Suppress[WorkloadName] = "nano"
    sampled: Suppress[bool] = False


Engine = Annotated[EngineFlags, arg(name="", constructor=by_topic(EngineFlags, ENGINE_TOPICS))]
Sampling = Annotated[SamplingFlags, arg(name="", constructor=by_topic(SamplingFlags, SAMPLING_TOPICS))]
Server = Annotated[ServerFlags, arg(name="", constructor=by_topic(ServerFlags, SERVER_TOPICS))]
Files = Annotated[FileFlags, arg(name="", constructor=by_topic(FileFlags, {"input and output": "input"}))]
Latency = Annotated[LatencyFlags, arg(name="", constructor=by_topic(LatencyFlags, {"latency": "rows"}))]
Throughput = Annotated[ThroughputFlags, arg(name="", constructor=by_topic(ThroughputFlags, {"throughput": "workload"}))]
Workloads = Annotated[ThroughputSizes, arg(name="", constructor=by_topic(ThroughputSizes, {"workloads": "workload"}))]
Startup = Annotated[StartupFlags, arg(name="", constructor=by_topic(StartupFlags, {"startup": "rounds"}))]
Kernels = Annotated[KernelFlags, arg(name="", constructor=by_topic(KernelFlags, {"kernels": "decode"}))]
Recording = Annotated[ProfileFlags, arg(name="", constructor=by_topic(ProfileFlags, {"profile": "rows"}))]
Load = Annotated[LoadFlags, arg(name="", constructor=by_topic(LoadFlags, {"load": "concurrency"}))]
ChatSampling = Annotated[ChatSamplingFlags, arg(name="", constructor=by_topic(ChatSamplingFlags, SAMPLING_TOPICS))]


@dataclass(frozen=True)
class Generate(CommandFlags):
    """Complete prompts, all in one batch.

    Example: jaxllm generate smollm2-135m-instruct "The sea is"
    """

    files: Files
    sampling: Sampling
    engine: Engine
    prompts: Prompts


@dataclass(frozen=True)
class Chat(CommandFlags):
    """Talk with a model. /help there lists what else can be typed; Ctrl-C stops an answer.

    Example: jaxllm chat smollm2-135m-instruct --temperature 0.7
    """

    sampling: ChatSampling
    engine: Engine
    system: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """Instructions that the conversation begins with."""


@dataclass(frozen=True)
class Serve(CommandFlags):
    """Serve a model over HTTP, as OpenAI's clients expect it.

    Example: jaxllm serve smollm2-135m-instruct --port 8000
    """

    server: Server
    engine: Engine


@dataclass(frozen=True, kw_only=True)
class _Benchmark(CommandFlags):
    json: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """File to write the figures to, with machine, versions and parameters; - is standard output."""


@dataclass(frozen=True)
class Profile(_Benchmark):
    """Record decode steps: where their time goes, on the device and on the host.

    The time of the same steps with nothing recorded stands beside theirs. On a GPU they run in CUDA graphs, as always;
    --enforce-eager does without.

    Example: jaxllm profile llama-3.1-8b --load-format dummy --rows 64 --context 512 --steps 32
    """

    recording: Recording
    engine: Engine


@dataclass(frozen=True)
class BenchLatency(_Benchmark):
    """Milliseconds of a decode step for some numbers of rows, of one stream's token, and up to a first token.

    Example: jaxllm bench latency llama-3.1-8b --load-format dummy --rows 1,64
    """

    latency: Latency
    engine: Engine


@dataclass(frozen=True)
class BenchThroughput(_Benchmark):
    """Tokens per second over a batch of requests.

    Example: jaxllm bench throughput qwen3-0.6b --load-format dummy --workload nano --sampled
    """

    throughput: Throughput
    engine: Engine


@dataclass(frozen=True)
class BenchStartup(_Benchmark):
    """Seconds from the start of a process to its first token, with empty caches and with warm ones.

    Example: jaxllm bench startup smollm2-135m-instruct --rounds 2
    """

    startup: Startup
    engine: Engine


@dataclass(frozen=True)
class BenchKernels(_Benchmark):
    """Attention and sampling by themselves: their share of the device's ceilings, and the error of attention.

    Example: jaxllm bench kernels --decode 64x4096,8x8192
    """

    kernels: Kernels


@dataclass(frozen=True)
class BenchAll(_Benchmark):
    """Latency and every throughput workload, with one start of the engine.

    Example: jaxllm bench all llama-3.1-8b --load-format dummy --max-model-len 4096
    """

    latency: Latency
    throughput: Workloads
    engine: Engine


@dataclass(frozen=True)
class BenchServe(_Benchmark):
    """Percentiles of TTFT, TPOT, ITL and E2E of a server that runs, and its output tokens per second. JAXLLM_API_KEY
    holds the key, if it wants one.

    Example: jaxllm bench serve http://localhost:8000 --concurrency 1,64 --json - --plot serve.png
    """

    load: Load
    url: Annotated[Positional[str], arg(metavar="URL")]
    """Address of a server with OpenAI's completions."""
    plot: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """File to draw the figures into, as serve.png."""


type AnyBenchmark = BenchLatency | BenchThroughput | BenchStartup | BenchKernels | BenchAll | BenchServe

Benchmark = (
    Annotated[BenchLatency, subcommand("latency")]
    | Annotated[BenchThroughput, subcommand("throughput")]
    | Annotated[BenchStartup, subcommand("startup")]
    | Annotated[BenchKernels, subcommand("kernels")]
    | Annotated[BenchAll, subcommand("all")]
    | Annotated[BenchServe, subcommand("serve")]
)


@dataclass(frozen=True)
class Bench:
    """Measure speed: of steps, of whole batches, of starting, of kernels, of a server.

    No model file is needed: --load-format dummy makes random weights in the shape of a known model.

    Example: jaxllm bench latency llama-3.1-8b --load-format dummy
    """

    benchmark: Benchmark

    @property
    def debug(self) -> bool:
        return self.benchmark.debug


type AnyCommand = Generate | Chat | Serve | Bench | Profile | Top | Convert | Pull | Models | Env

Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Profile, subcommand("profile")]
    | Annotated[Top, subcommand("top")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Pull, subcommand("pull")]
    | Annotated[Models, subcommand("models")]
    | Annotated[Env, subcommand("env")]
)

MODULES: dict[type, str] = {
    Generate: "jaxllm.serving.cli_generate",
    Chat: "jaxllm.serving.cli_chat",
    Serve: "jaxllm.serving.cli_serve",
    Bench: "jaxllm.serving.cli_bench",
    Profile: "jaxllm.serving.cli_profile",
    Top: "jaxllm.serving.cli_top",
    Convert: "jaxllm.serving.cli_convert",
    Pull: "jaxllm.serving.cli_pull",
    Models: "jaxllm.serving.cli_models",
    Env: "jaxllm.serving.cli_env",
}
"""The module whose `run` executes a command; imported only then, because most of them import JAX."""
