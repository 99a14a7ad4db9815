"""Measures `jaxllm serve` as its clients see it, and the same requests without it, and writes the JSON.

    python3 scripts/bench_serve.py MODEL [--concurrency 64 256] [--folder FOLDER] [--commit HASH] [FLAGS OF jaxllm serve]

Starts the server, keeps each number of requests in flight (prompts of 512 tokens, answers of 256), and ends it. Then the
same requests go to an engine of the same settings in this process, as many at a time. FOLDER is by default $OUT, or
benchmarks/. Needs the extras serve and bench.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from soak_server import PROGRAM, START_SECONDS, find_address  # noqa: E402

from jaxllm.bench.report import Figure, Report, describe_machine, round_to, show_number  # noqa: E402
from jaxllm.bench.serve import report_serve  # noqa: E402
from jaxllm.bench.settings import ServeSettings  # noqa: E402
from jaxllm.bench.workloads import Workload, same_length  # noqa: E402
from jaxllm.llm import LLM  # noqa: E402
from jaxllm.sampling_params import SamplingParams  # noqa: E402

PER_STREAM = 4
"""Requests for each in flight, as `jaxllm bench serve` sends them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=ServeSettings.vocab_size, help="ids below it make prompts")
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks"))
    parser.add_argument("--commit", help="the commit, where the checkout is a copy without its history")
    options, flags = parser.parse_known_args()
    sizes = {name: getattr(options, name) for name in ("input_len", "output_len", "vocab_size")}
    settings = ServeSettings(tuple(options.concurrency), **sizes)
    report = serve(options.model, flags, settings)
    offline, machine = compare(options.model, flags, settings)
    shares = [share(served, batch) for served, batch in zip(report.figures[::5], offline, strict=True)]
    parameters = {**report.parameters, "engine": engine_fields(options.model, flags)}
    report = dataclasses.replace(
        report,
        machine=machine,
        parameters=parameters,
        figures=[*report.figures, *offline, *shares],
        command=" ".join(["scripts/bench_serve.py", options.model, *flags]),
        commit=options.commit or report.commit,
    )
    report.write(options.folder / f"{time.strftime('%Y-%m-%d', time.gmtime())}-serve.json")


def serve(model: str, flags: list[str], settings: ServeSettings) -> Report:
    """What clients of a server see."""
    with tempfile.NamedTemporaryFile("w+", prefix="bench-serve-", suffix=".log", delete=False) as log:
        command = [*PROGRAM, "serve", model, "--port", "0", *flags]
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            return report_serve(wait_ready(Path(log.name), server), settings)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def wait_ready(log: Path, server: subprocess.Popen) -> str:
    """The server's address, once it answers."""
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        if address := find_address(log.read_text()):
            return address
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-5000:]}")


def compare(model: str, flags: list[str], settings: ServeSettings) -> tuple[list[Figure], dict[str, Any]]:
    """The same numbers of requests in flight, of the same lengths, without a server; what they ran on."""
    figures = []
    with LLM(**engine_fields(model, flags)) as llm:
        for number, concurrency in enumerate(settings.concurrency):
            lengths = settings.input_len, settings.output_len, settings.vocab_size
            keep_in_flight(
                llm, same_length(concurrency, settings.input_len, 4, settings.vocab_size, 100 + number), concurrency
            )
            workload = same_length(PER_STREAM * concurrency, *lengths, seed=number)
            start = time.perf_counter()
            keep_in_flight(llm, workload, concurrency)
            value = round_to(workload.num_output_tokens / (time.perf_counter() - start))
            figures.append(Figure(f"{concurrency} streams: offline", value, "output tok/s", {}))
            print(f"{figures[-1].name}: {show_number(value)}", file=sys.stderr, flush=True)
        machine = describe_machine(llm.engine.core.runner.mesh.devices.flat)
    return figures, machine


def keep_in_flight(llm: LLM, workload: Workload, concurrency: int) -> None:
    """Answers all requests of a workload; one comes when another one is answered."""
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in workload.output_lens]
    requests = iter(enumerate(zip(workload.prompts, params, strict=True)))
    for index, (prompt, sampling) in itertools.islice(requests, concurrency):
        llm.engine.add_request(str(index), prompt, sampling)
    while llm.engine.has_unfinished_requests():
        finished = sum(output.finished for output in llm.engine.step())
        for index, (prompt, sampling) in itertools.islice(requests, finished):
            llm.engine.add_request(str(index), prompt, sampling)


def share(served: Figure, offline: Figure) -> Figure:
    name = served.name.replace("output", "share of offline")
    return Figure(name, round_to(100 * served.value / offline.value), "%", {})


def engine_fields(model: str, flags: list[str]) -> dict[str, Any]:
    """The engine's keywords that stand for the server's flags."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {"model": model, **{flag[2:].replace("-", "_"): number(text) for flag, text in pairs}}


def number(text: str) -> int | float | str:
    """A flag's value as a keyword has it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    main()
