"""Seconds from the start of a process to the first token of the demo model, without and with compiled programs.

    .venv/bin/python scripts/bench_startup.py [--rounds 3]

Every round starts two processes over one fresh cache folder, into which only the model's file is linked:
the first compiles, the second finds what the first stored. Prints the medians, and JSON as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxllm.models.hub import resolve_model

ANSWER = """
import sys
from jaxllm import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    print("first token", flush=True)
"""


def measure(model: Path, cache: str) -> float:
    """Seconds until the process says that it has a token."""
    start = time.perf_counter()
    command = [sys.executable, "-c", ANSWER, str(model)]
    environment = os.environ | {"JAXLLM_CACHE": cache}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    assert line.strip() == "first token", f"the process ended with exit code {process.returncode}"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    model = resolve_model("smollm2-135m-instruct")
    seconds: dict[str, list[float]] = {"empty": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for state in seconds.values():
                state.append(measure(model, cache))
    medians = {state: round(statistics.median(values), 1) for state, values in seconds.items()}
    print("caches empty: {empty} s, warm: {warm} s".format(**medians))
    print(json.dumps({"seconds": seconds, "medians": medians}))


if __name__ == "__main__":
    main()
