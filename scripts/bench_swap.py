"""Times what swapping costs and what it is for, and writes the JSON. One process, one engine.

    python3 scripts/bench_swap.py [--only copies overlap offline] [--folder FOLDER] [--commit HASH] [--tiny]

copies: K/V of victims of 200, 1,000 and 8,000 tokens to host memory and back, against computing them again. overlap:
decode steps alone, and with as many copies launched before each of them. offline: nano-vllm's requests with a third of
the blocks that they want, where who is preempted is swapped out, computed again, or whichever takes less time; and
without any host memory. Only the buckets that are needed are compiled. FOLDER is by default $OUT, or benchmarks/.
--tiny tries all of it on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402 - a checkout that is not installed is measured, too

from jaxllm.bench.latency import decode_seconds, decode_workload  # noqa: E402
from jaxllm.bench.report import Figure, Report, describe_machine, round_to, show_number  # noqa: E402
from jaxllm.bench.throughput import run_workload  # noqa: E402
from jaxllm.bench.workloads import nano, random_prompt  # noqa: E402
from jaxllm.llm import LLM  # noqa: E402
from jaxllm.runner import host_memory, programs  # noqa: E402
from jaxllm.runner.buckets import Bucket, BucketLadder  # noqa: E402
from jaxllm.sampling_params import SamplingParams  # noqa: E402
from jaxllm.scheduling.host_tier import HostTier  # noqa: E402
from jaxllm.scheduling.plan import StepPlan, SwapIn, SwapOut  # noqa: E402
from jaxllm.scheduling.swap_rule import SwapRule  # noqa: E402

PARTS = ("copies", "overlap", "offline")
MODES: dict[str, tuple[str, bool]] = {
    "swap": ("swap", True),
    "auto": ("auto", True),
    "recompute": ("recompute", True),
    "recompute, no host memory": ("recompute", False),
}
"""preemption_mode, and whether there is host memory (where cached blocks are kept in every mode)."""


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    engine: dict[str, Any]
    decode: tuple[int, ...]
    """Decode buckets."""
    mixed: tuple[int, ...]
    victims: tuple[int, ...]
    """Tokens."""
    rounds: int
    rows: int
    """Of the decode steps."""
    context: int
    steps: int
    overlapping: tuple[int, ...]
    """Tokens that are copied before each step."""
    requests: int
    """Of the offline workload."""
    longest: int


FULL = Scale(
    engine={
        "model": "llama-3.1-8b",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 9216,
        # Named, so that nothing has to be compiled to find out.
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": 5889,
        "num_scheduler_steps": 1,
        "swap_space": 16,
    },
    decode=(16, 64, 128, 192, 256),
    mixed=(256, 1024, 8192),
    victims=(200, 1000, 8000),
    rounds=5,
    rows=64,
    context=512,
    steps=40,
    overlapping=(256, 1024),
    requests=256,
    longest=1024,
)
TINY = Scale(
    engine={
        "model": "tiny-llama",
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 34,
        "swap_space": 0.05,
    },
    decode=(8,),
    mixed=(64,),
    victims=(20, 100, 400),
    rounds=2,
    rows=4,
    context=32,
    steps=8,
    overlapping=(64,),
    requests=12,
    longest=150,
)
TINY_CHUNK = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks"))
    parser.add_argument("--commit", help="the commit, where the checkout is a copy without its history")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--chunk-tokens", type=int, default=host_memory.CHUNK_TOKENS, help="tokens that a copy moves")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    arguments = parser.parse_args()
    host_memory.CHUNK_TOKENS = TINY_CHUNK if arguments.tiny else arguments.chunk_tokens
    scale = TINY if arguments.tiny else FULL
    if arguments.tiny:
        jax.config.update("jax_platforms", "cpu")
    report = _measure(scale, arguments.only)
    command = f"scripts/bench_swap.py --only {' '.join(arguments.only)}{' --tiny' * arguments.tiny}"
    report = dataclasses.replace(report, command=command, commit=arguments.commit or report.commit)
    name = "-".join(arguments.only) if arguments.only != list(PARTS) else "all"
    report.write(arguments.folder / f"{report.date[:10]}-swap-{name}{'-tiny' * arguments.tiny}.json")
    return any(figure.is_wrong for figure in report.figures)


def _measure(scale: Scale, parts: list[str]) -> Report:
    rows = scale.engine["max_num_seqs"]
    ladder = BucketLadder(
        tuple(Bucket(size, size, admits=False) for size in scale.decode),
        tuple(Bucket(size, min(size, rows), admits=True) for size in scale.mixed),
    )
    programs.make_ladder = lambda *_: ladder
    start = time.perf_counter()
    with LLM(**scale.engine) as llm:
        print(f"ready after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        llm.print_memory_stats()
        figures = [_say(figure) for part in parts for figure in _PARTS[part](llm, scale)]
        runner = llm.engine.core.runner
        machine = describe_machine(runner.mesh.devices.flat)
        parameters = {
            "engine": dataclasses.asdict(llm.engine.config),
            "buckets": [bucket.name for bucket in runner.programs.ladder.all],
            "chunk_tokens": runner.size.chunk_tokens,
            "chunk_bytes": runner.host.chunk_bytes,
        }
        assert runner.num_compiles_since_ready == 0, "something was compiled while it was timed"
    return Report("swap", scale.engine["model"], machine, parameters, figures)


# Copies, alone.


def _copies(llm: LLM, scale: Scale) -> Iterator[Figure]:
    engine = llm.engine
    for tokens in scale.victims:
        out, back = _copy_plans(llm, tokens)
        moved = len(out.swap_out) * engine.core.runner.host.chunk_bytes
        for name, plan in (("out", out), ("in", back)):
            calls, seconds = zip(*(_time_copy(llm, plan) for _ in range(scale.rounds + 1)), strict=True)
            best = statistics.median(seconds[1:])
            details = {
                "gigabytes_per_s": round_to(moved / best / 1e9),
                "chunks": len(out.swap_out),
                "call_ms": round_to(1e3 * statistics.median(calls[1:])),
            }
            yield Figure(f"swap {name} a victim of {tokens} tokens", round_to(1e3 * best), "ms", details)
        seconds = [_time_computing(llm, tokens, seed) for seed in range(scale.rounds + 1)]
        best = statistics.median(seconds[1:])
        details = {"tokens_per_s": round_to(tokens / best)}
        yield Figure(f"compute a victim of {tokens} tokens again", round_to(1e3 * best), "ms", details)


def _copy_plans(llm: LLM, tokens: int) -> tuple[StepPlan, StepPlan]:
    """Plans that copy as many blocks out as that many tokens have, and drop as many that come back."""
    size = llm.engine.core.runner.size
    blocks = -(-tokens // size.block_size)
    out, back = [], []
    for chunk in range(-(-blocks // size.chunk_blocks)):
        count = min(blocks - chunk * size.chunk_blocks, size.chunk_blocks)
        first = 1 + chunk * size.chunk_blocks
        out.append(SwapOut(chunk, tuple(block % size.num_blocks for block in range(first, first + count))))
        back.append(SwapIn(chunk, tuple(range(count)), (size.num_blocks,) * count))
    assert len(out) <= size.host_chunks, f"swap_space holds {size.host_chunks} chunks, {len(out)} are needed"
    return StepPlan(swap_out=tuple(out)), StepPlan(swap_in=tuple(back))


def _time_copy(llm: LLM, plan: StepPlan) -> tuple[float, float]:
    """Seconds until the call returns, and until all is done."""
    runner = llm.engine.core.runner
    jax.block_until_ready((runner.cache, runner.host._chunks))
    start = time.perf_counter()
    runner.cache = runner.host.run(plan, runner.cache)
    called = time.perf_counter()
    jax.block_until_ready((runner.cache, runner.host._chunks))
    return called - start, time.perf_counter() - start


def _time_computing(llm: LLM, tokens: int, seed: int) -> float:
    engine = llm.engine
    prompt = random_prompt(tokens, engine.model_config.vocab_size, seed=10**6 + tokens * 100 + seed)
    start = time.perf_counter()
    engine.add_request("again", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


# Copies beside running steps.


def _overlap(llm: LLM, scale: Scale) -> Iterator[Figure]:
    alone = _decode_ms(llm, scale, None)
    name = f"decode step, {scale.rows} rows, context {scale.context}"
    yield Figure(name, round_to(alone), "ms", {"steps": scale.steps})
    for tokens in scale.overlapping:
        out, back = _copy_plans(llm, tokens)
        both = StepPlan(swap_out=out.swap_out, swap_in=back.swap_in)
        for direction, plan in (("out", out), ("in", back), ("out and in", both)):
            copying = 1e3 * statistics.median(_time_copy(llm, plan)[1] for _ in range(3))
            beside = _decode_ms(llm, scale, plan)
            details = {
                "alone_ms": round_to(alone),
                "copies_alone_ms": round_to(copying),
                "hidden_share": round_to((alone + copying - beside) / min(alone, copying), 3),
            }
            yield Figure(f"{name}, {tokens} tokens {direction} beside each", round_to(beside), "ms", details)


def _decode_ms(llm: LLM, scale: Scale, copies: StepPlan | None) -> float:
    """Median of a step, each launched behind these copies."""
    runner = llm.engine.core.runner
    launch = runner.launch

    def with_copies(plan: StepPlan):
        if copies is not None:
            runner.cache = runner.host.run(copies, runner.cache)
        return launch(plan)

    runner.launch = with_copies
    try:
        llm.engine.reset_prefix_cache()
        workload = decode_workload(llm.engine, scale.rows, scale.context, scale.steps)
        return 1e3 * statistics.median(decode_seconds(llm.engine, workload, scale.steps))
    finally:
        runner.launch = launch


# A cache that is too small.


def _offline(llm: LLM, scale: Scale) -> Iterator[Figure]:
    core, vocab_size = llm.engine.core, llm.engine.model_config.vocab_size
    size = core.runner.size
    for variant, (name, (mode, with_host)) in enumerate(MODES.items(), 1):
        workload = nano(scale.requests, scale.longest, variant, vocab_size)
        lengths = zip(workload.prompts, workload.output_lens, strict=True)
        wanted = sum(-(-(len(prompt) + length) // size.block_size) for prompt, length in lengths)
        assert llm.reset_prefix_cache(), "requests are left"
        kv, host = core.scheduler.kv, core.runner.host
        rule = SwapRule(mode, core.runner.swap_costs)  # pyright: ignore[reportArgumentType]
        kept = size if with_host else dataclasses.replace(size, host_chunks=0)
        kv.host = HostTier(kv.pool, kept, rule)
        before = host.num_out, host.num_in, core.scheduler.thrash.num_lost_tokens
        run = run_workload(llm, workload)
        after = host.num_out, host.num_in, core.scheduler.thrash.num_lost_tokens
        chunks_out, chunks_in, lost = (new - old for new, old in zip(after, before, strict=True))
        details = run.details | {
            "blocks_share": round_to((size.num_blocks - 1) / wanted, 3),
            "gigabytes_out": round_to(chunks_out * host.chunk_bytes / 1e9),
            "gigabytes_in": round_to(chunks_in * host.chunk_bytes / 1e9),
            "tokens_given_up": lost,
        }
        title = f"{scale.requests} requests of nano-vllm's benchmark, a third of the blocks, {name}"
        yield Figure(title, round_to(workload.num_output_tokens / run.seconds), "output tok/s", details)


_PARTS: dict[str, Callable[[LLM, Scale], Iterator[Figure]]] = {
    "copies": _copies,
    "overlap": _overlap,
    "offline": _offline,
}


def _say(figure: Figure) -> Figure:
    shown = ", ".join(f"{name} {show_number(value)}" for name, value in figure.details.items())
    print(f"{figure.name}: {show_number(figure.value)} {figure.unit} ({shown})", file=sys.stderr, flush=True)
    return figure


if __name__ == "__main__":
    sys.exit(main())
