"""Profiles decode steps on one GPU: tables, JSON and a page for each number of rows.

    python3 scripts/bench_profile.py [--model llama-3.1-8b] [--rows 1 64] [--context 512] [--steps 32]
                                     [--folder FOLDER] [--commit HASH] [--eager] [--trace]

Weights are random. One start of an engine records all numbers of rows. FOLDER, by default $OUT or benchmarks/, gets
DATE-profile-MODEL-ROWS.json, .txt and .html; --trace also leaves JAX's own trace there, which is large. --eager does
without CUDA graphs. Needs the engine's own dependencies only, not the command line's. Also measured: what the
annotations cost a step that is not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxllm.bench.profile import profile_decode, to_report  # noqa: E402 - a checkout that is not installed
from jaxllm.bench.settings import ProfileSettings  # noqa: E402
from jaxllm.llm import LLM  # noqa: E402
from jaxllm.profiling.report import Profile  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks"))
    parser.add_argument("--commit", help="the commit, where the checkout is a copy without its history")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with LLM(**_engine_fields(arguments)) as llm, tempfile.TemporaryDirectory() as folder:
        for rows in arguments.rows:
            settings = ProfileSettings(rows, arguments.context, arguments.steps, folder)
            profile = profile_decode(llm.engine, settings)
            report = to_report(profile, llm.engine, settings)
            _write(profile, report, rows, arguments)
            _say(profile, report["annotations_us"])


def _engine_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """An engine just large enough: each program takes seconds to compile."""
    length = arguments.context + 4 * arguments.steps + 512
    return {
        "model": arguments.model,
        "load_format": "dummy",
        "max_model_len": length,
        "max_num_seqs": max(arguments.rows),
        "max_num_batched_tokens": 2048,
        "enforce_eager": arguments.eager,
    }


def _write(profile: Profile, report: dict[str, Any], rows: int, arguments: argparse.Namespace) -> None:
    report["command"] = "scripts/bench_profile.py " + " ".join(sys.argv[1:])
    report["commit"] = arguments.commit or report["commit"]
    report["parameters"]["profile"]["output"] = ""  # a folder that is gone
    name = f"{report['date'][:10]}-profile-{Path(arguments.model).name}-{rows}{'-eager' * arguments.eager}"
    stem = arguments.folder / name
    stem.with_name(name + ".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    stem.with_name(name + ".txt").write_text(str(profile), encoding="utf-8")
    shutil.copy(profile.timeline, stem.with_name(name + ".html"))
    if arguments.trace:
        shutil.copytree(profile.folder, stem, dirs_exist_ok=True)


def _say(profile: Profile, annotations_us: float) -> None:
    print(profile, flush=True)
    bucket, unprofiled = profile.summary.buckets[0], profile.summary.unprofiled_step_ms
    if bucket.accounted is not None and unprofiled:
        print(f"== stages and idle time are {bucket.accounted:.1%} of the profiled step")
        share = annotations_us / unprofiled / 1e3
        print(
            f"== with nothing recorded, annotations cost {annotations_us:.1f} us: {share:.2%} of a step\n", flush=True
        )


if __name__ == "__main__":
    main()
