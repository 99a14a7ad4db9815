"""Measures everything that README's table holds, on one GPU, and writes the JSON.

    python3 scripts/bench_h200.py [--folder FOLDER] [--commit HASH] [--only all-8b kernels ...]

One process per model does what one start of an engine can (latency, throughput), one the same with batch_invariant, one
more the kernels; then come the starts, and one row with enforce_eager. Needs the engine's own dependencies only, not the command line's. FOLDER is by default $OUT, or benchmarks/.
What fails is said at the end, and the others are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxllm.bench.report import Report  # noqa: E402 - a checkout that is not installed is measured, too
from jaxllm.bench.runs import report_all, report_kernels, report_latency, report_startup  # noqa: E402
from jaxllm.bench.settings import (  # noqa: E402
    KernelSettings,
    LatencySettings,
    StartupSettings,
    ThroughputSettings,
)

ENGINE = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096}
MODELS = {"8b": {"model": "llama-3.1-8b", **ENGINE}, "0.6b": {"model": "qwen3-0.6b", **ENGINE}}


EAGER = {"enforce_eager": True}
ONE_ROW = LatencySettings(rows=(1,))
ONE_START = StartupSettings(rounds=1, eager=True)

PARTS: dict[str, Callable[[], Report]] = {
    **{
        f"all-{name}": partial(report_all, fields, LatencySettings(), ThroughputSettings())
        for name, fields in MODELS.items()
    },
    **{
        f"invariant-{name}": partial(
            report_all, {**fields, "batch_invariant": True}, LatencySettings(), ThroughputSettings()
        )
        for name, fields in MODELS.items()
    },
    "kernels": partial(report_kernels, KernelSettings()),
    **{f"startup-{name}": partial(report_startup, fields, ONE_START) for name, fields in MODELS.items()},
    **{f"eager-{name}": partial(report_latency, {**fields, **EAGER}, ONE_ROW) for name, fields in MODELS.items()},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks"))
    parser.add_argument("--commit", help="the commit, where the checkout is a copy without its history")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--here", action="store_true", help="measure the one part in this process")
    arguments = parser.parse_args()
    if arguments.here:
        _measure(arguments.only[0], arguments.folder, arguments.commit)
        return 0
    failed = [part for part in arguments.only if not _measure_in_a_process(part, arguments)]
    print("failed: " + ", ".join(failed) if failed else "all measured", flush=True)
    return len(failed) > 0


def _measure_in_a_process(part: str, arguments: argparse.Namespace) -> bool:
    start = time.perf_counter()
    command = [sys.executable, __file__, "--here", "--only", part, "--folder", str(arguments.folder)]
    command += ["--commit", arguments.commit] if arguments.commit else []
    done = subprocess.run(command, cwd=ROOT)
    print(f"== {part}: exit code {done.returncode}, {time.perf_counter() - start:.0f} s", flush=True)
    return done.returncode == 0


def _measure(part: str, folder: Path, commit: str | None) -> None:
    report = PARTS[part]()
    command = f"scripts/bench_h200.py --only {part}"
    report = dataclasses.replace(report, command=command, commit=commit or report.commit)
    path = folder / f"{report.date[:10]}-{part}.json"
    report.write(path)
    print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
