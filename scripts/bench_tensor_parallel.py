"""Checks and times tensor parallelism on two GPUs, and writes the JSON.

    python3 scripts/bench_tensor_parallel.py [--folder FOLDER] [--commit HASH] [--only tp1 tp2 tp2-nccl golden] [--tiny]

One process per part. tp1, tp2 and tp2-nccl start the same model on one device, on two, and on two with NCCL's
all-reduce; each times decode steps and one batch of requests. tp2 and tp2-nccl also sample for 1,000 steps and compare what
the two devices have, bit by bit. golden holds the demo model's greedy tokens on one and on two devices, in float32,
against those of transformers (--demo names its file; skipped where it or the gguf package is missing). Only the
buckets that are needed are compiled. Needs the engine's own dependencies only, not the command line's. FOLDER is by
default $OUT, or benchmarks/. --tiny tries all of it on fake CPU devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402 - a checkout that is not installed is measured, too
import numpy as np  # noqa: E402

from jaxllm.bench.latency import measure_latency  # noqa: E402
from jaxllm.bench.report import Figure, Report, describe_machine, round_to, show_number  # noqa: E402
from jaxllm.bench.settings import LatencySettings  # noqa: E402
from jaxllm.bench.throughput import run_workload  # noqa: E402
from jaxllm.bench.workloads import nano, same_length  # noqa: E402
from jaxllm.llm import LLM  # noqa: E402
from jaxllm.runner import programs  # noqa: E402
from jaxllm.runner.buckets import Bucket, BucketLadder  # noqa: E402
from jaxllm.sampling_params import SamplingParams  # noqa: E402

CLOSE_CALL = 0.002
"""Where the golden tokens' best two logits are nearer than this, another order of summation may pick the other."""
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    engine: dict[str, Any]
    decode: tuple[int, ...]
    """Decode buckets."""
    mixed: tuple[int, ...]
    latency: LatencySettings
    requests: int
    """Of the batch."""
    longest: int
    """Most tokens of its prompts and answers."""
    agreeing_steps: int
    agreeing_rows: int


FULL = Scale(
    engine={
        "model": "llama-3.1-8b",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        # Named, so that nothing has to be compiled to find out.
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": 24576,
    },
    decode=(1, 16, 64, 128, 192, 256),
    mixed=(128, 1024, 8192),
    latency=LatencySettings(steps=60, rounds=3),
    requests=256,
    longest=1024,
    agreeing_steps=1000,
    agreeing_rows=64,
)
TINY = Scale(
    engine={
        "model": "tiny-llama",
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 80,
    },
    decode=(4,),
    mixed=(64,),
    latency=LatencySettings(rows=(1, 4), context=32, steps=10, prompt_len=16, rounds=1),
    requests=6,
    longest=60,
    agreeing_steps=50,
    agreeing_rows=4,
)

ENGINES: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-nccl": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
}
PARTS = (*ENGINES, "golden")
MOST_SECONDS = {"tp1": 150, "tp2": 150, "tp2-nccl": 150, "golden": 120}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks"))
    parser.add_argument("--commit", help="the commit, where the checkout is a copy without its history")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--demo", default="smollm2-135m-instruct", help="the demo model: its name or file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on fake CPU devices")
    parser.add_argument("--here", action="store_true", help="do the one part in this process")
    arguments = parser.parse_args()
    if arguments.here:
        return _do(arguments)
    reports = {part: _in_a_process(part, arguments) for part in arguments.only}
    _compare({part: report for part, report in reports.items() if report})
    failed = [part for part, report in reports.items() if report is None or not _is_right(report)]
    print("failed: " + ", ".join(failed) if failed else "all done", flush=True)
    return len(failed) > 0


def _in_a_process(part: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The part's report; None if it failed, or did not end in time (devices that wait for one another)."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--here", "--only", part, "--folder", str(arguments.folder)]
    command += ["--demo", arguments.demo, *["--tiny"] * arguments.tiny]
    command += ["--commit", arguments.commit] if arguments.commit else []
    _path(arguments.folder, part).unlink(missing_ok=True)
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=MOST_SECONDS[part]).returncode
    except subprocess.TimeoutExpired:
        code = "none, it took too long"
    print(f"== {part}: exit code {code}, {time.perf_counter() - start:.0f} s", flush=True)
    path = _path(arguments.folder, part)
    return json.loads(path.read_text()) if code == 0 and path.exists() else None


def _do(arguments: argparse.Namespace) -> int:
    """One part, in this process."""
    (part,) = arguments.only
    if arguments.tiny:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
    scale = TINY if arguments.tiny else FULL
    if part == "golden":
        report = _golden(arguments.demo)
        if report is None:
            print(f"golden: skipped, {arguments.demo} or the gguf package is not here", flush=True)
            return 1
    else:
        report = _engine_part(part, scale)
    command = f"scripts/bench_tensor_parallel.py --only {part}{' --tiny' * arguments.tiny}"
    report = dataclasses.replace(report, command=command, commit=arguments.commit or report.commit)
    report.write(_path(arguments.folder, part))
    return 0


def _path(folder: Path, part: str) -> Path:
    return folder / f"{time.strftime('%Y-%m-%d', time.gmtime())}-tensor-parallel-{part}.json"


def _engine_part(part: str, scale: Scale) -> Report:
    fields = {**scale.engine, **ENGINES[part]}
    rows = fields["max_num_seqs"]
    ladder = BucketLadder(
        tuple(Bucket(size, size, admits=False) for size in scale.decode),
        tuple(Bucket(size, min(size, rows), admits=True) for size in scale.mixed),
    )
    programs.make_ladder = lambda *_: ladder
    start = time.perf_counter()
    with LLM(**fields) as llm:
        print(f"{part}: ready after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        llm.print_memory_stats()
        figures = [_say(figure) for figure in _measure(llm, scale)]
        runner = llm.engine.core.runner
        machine = describe_machine(runner.mesh.devices.flat)
        parameters: dict[str, Any] = {
            "engine": dataclasses.asdict(llm.engine.config),
            "latency": dataclasses.asdict(scale.latency),
        }
        parameters["buckets"] = [bucket.name for bucket in runner.programs.ladder.all]
        assert runner.num_compiles_since_ready == 0, "something was compiled while it was timed"
    return Report("tensor-parallel", fields["model"], machine, parameters, figures)


def _measure(llm: LLM, scale: Scale) -> Iterator[Figure]:
    yield from measure_latency(llm.engine, scale.latency)
    vocab_size = llm.engine.model_config.vocab_size
    run = run_workload(llm, nano(scale.requests, scale.longest, 1, vocab_size))
    name = f"{scale.requests} requests of nano-vllm's benchmark, greedy, few buckets"
    yield Figure(name, round_to(run.workload.num_output_tokens / run.seconds), "output tok/s", run.details)
    if llm.engine.core.runner.mesh.size > 1:
        yield _agreement(llm, scale)


def _agreement(llm: LLM, scale: Scale) -> Figure:
    """Samples, and compares what every device has of each step's tokens and log-probabilities."""
    runner = llm.engine.core.runner
    outputs: list[jax.Array] = []
    launch = runner.launch

    def watched(*arguments: Any, **options: Any):
        pending = launch(*arguments, **options)
        outputs.append(pending.output)
        return pending

    runner.launch = watched
    longest = llm.engine.config.max_model_len
    assert isinstance(longest, int)
    length = min(scale.agreeing_steps + 8, longest - 32)
    vocab_size = llm.engine.model_config.vocab_size
    try:
        run = run_workload(llm, same_length(scale.agreeing_rows, 16, length, vocab_size, seed=5), SAMPLED)
    finally:
        runner.launch = launch
    differing = sum(not _is_equal_everywhere(output) for output in outputs)
    details = {"correct": differing == 0, "rows": scale.agreeing_rows, "calls": len(outputs), "steps": run.steps}
    return Figure(f"steps of {length} in which devices differ, sampled", float(differing), "calls", details)


def _is_equal_everywhere(output: jax.Array) -> bool:
    first, *others = (np.asarray(shard.data) for shard in output.addressable_shards)
    assert others and first.shape == output.shape, "a step's result does not lie whole on every device"
    return all(first.tobytes() == other.tobytes() for other in others)


def _golden(demo: str) -> Report | None:
    """The demo model on one and on two devices; None where it is not here."""
    from_name = not Path(demo).exists()
    if importlib.util.find_spec("gguf") is None and not Path(demo).is_dir():
        return None
    cases = json.loads((ROOT / "tests" / "data" / "smollm2_greedy.json").read_text())["cases"]
    fields = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    ladder = BucketLadder((Bucket(16, 16, admits=False),), (Bucket(512, 16, admits=True),))
    programs.make_ladder = lambda *_: ladder
    figures = []
    for size in (1, 2):
        # 9 query and 3 K/V heads: two devices have two places for K/V heads each, one of which stays empty.
        with LLM(demo, tensor_parallel_size=size, num_gpu_blocks_override=2048, **fields) as llm:
            params = [SamplingParams(temperature=0, max_tokens=len(case["gen"])) for case in cases]
            outputs = llm.generate([case["prompt_ids"] for case in cases], params, use_tqdm=False)
            machine = describe_machine(llm.engine.core.runner.mesh.devices.flat)
        found = [output.outputs[0].token_ids for output in outputs]
        counts = [
            next((n for n, gap in enumerate(case["top2_gap"]) if gap < CLOSE_CALL), len(case["gen"])) for case in cases
        ]
        right = [list(ids[:n]) == case["gen"][:n] for ids, n, case in zip(found, counts, cases, strict=True)]
        details = {"correct": all(right), "cases": len(cases), "wrong_cases": right.count(False)}
        figures.append(
            _say(Figure(f"golden tokens compared, float32, {size} devices", float(sum(counts)), "tokens", details))
        )
    name = demo if from_name else Path(demo).name
    return Report("tensor-parallel", name, machine, {"engine": fields}, figures)


def _say(figure: Figure) -> Figure:
    wrong = "  WRONG" if figure.is_wrong else ""
    print(f"{figure.name}: {show_number(figure.value)} {figure.unit}{wrong}", file=sys.stderr, flush=True)
    return figure


def _is_right(report: dict[str, Any]) -> bool:
    return all(figure["details"].get("correct") is not False for figure in report["figures"])


def _compare(reports: dict[str, dict[str, Any]]) -> None:
    """Prints every figure of the engines, and its ratio to the one of one device."""
    values = {
        part: {figure["name"]: figure for figure in report["figures"]}
        for part, report in reports.items()
        if part in ENGINES
    }
    for name in dict.fromkeys(name for figures in values.values() for name in figures):
        print(name)
        for part, figures in values.items():
            if name in figures:
                value, one = figures[name]["value"], values.get("tp1", {}).get(name)
                ratio = f"  {value / one['value']:.3f} of tp1" if one and one["value"] and part != "tp1" else ""
                print(f"    {part:10} {show_number(value)} {figures[name]['unit']}{ratio}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
