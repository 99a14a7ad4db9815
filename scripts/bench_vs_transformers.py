"""Output tokens per second of jaxllm and of Hugging Face transformers, on the same machine in alternating runs.

    .venv/bin/python scripts/bench_vs_transformers.py --transformers-python PATH [--streams 1 16] [--rounds 3]

PATH is the Python of an environment with torch and transformers (and gguf). Both load the demo model in
float32 and answer the same random prompts greedily; each is a process of its own that sleeps while the
other one runs (so nothing of either is imported up here). Prints a table, and JSON as the last line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MODEL = "smollm2-135m-instruct"
VOCAB_SIZE = 49152
# Plain assignments: the environment of transformers may have a Python older than 3.12.
Prompts = list[list[int]]
Answer = Callable[[Prompts, int], int]
"""Answers prompts with that many tokens each; returns the tokens generated."""


def load_jaxllm(path: str) -> Answer:
    jaxllm = importlib.import_module("jaxllm")
    llm = jaxllm.LLM(path, dtype="float32")

    def answer(prompts: Prompts, num_tokens: int) -> int:
        params = jaxllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return answer


def load_transformers(path: str) -> Answer:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    file = Path(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)

    def answer(prompts: Prompts, num_tokens: int) -> int:
        ids = torch.tensor(prompts)
        settings = {"do_sample": False, "min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, pad_token_id=0, **settings)
        return (out.shape[1] - ids.shape[1]) * ids.shape[0]

    return answer


def work(load: Callable[[str], Answer], path: str) -> None:
    """Answers one job a line of standard input, and says how long it took."""
    answer = load(path)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        start = time.perf_counter()
        count = answer(prompts, num_tokens)
        print(json.dumps({"tokens": count, "seconds": time.perf_counter() - start}), flush=True)


WORKERS = {"jaxllm": load_jaxllm, "transformers": load_transformers}


class Worker:
    """One engine in a process of its own."""

    def __init__(self, python: str, name: str, path: str):
        command = [python, __file__, "--worker", name, "--model-file", path]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.read()

    def read(self):
        """The next line of JSON; other lines are the libraries' chatter."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", '"')):
                return json.loads(line)
        raise RuntimeError(f"{self.process.args} ended with exit code {self.process.wait()}")

    def run(self, prompts: Prompts, num_tokens: int) -> float:
        """Output tokens per second."""
        assert self.process.stdin is not None
        print(json.dumps([prompts, num_tokens]), file=self.process.stdin, flush=True)
        result = self.read()
        return result["tokens"] / result["seconds"]


def measure(arguments: argparse.Namespace, path: str) -> list[dict]:
    workers = {
        "transformers": Worker(arguments.transformers_python, "transformers", path),
        "jaxllm": Worker(sys.executable, "jaxllm", path),
    }
    rows = []
    for streams in arguments.streams:
        rng = random.Random(streams)
        prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(arguments.prompt_tokens)] for _ in range(streams)]
        for worker in workers.values():
            worker.run(prompts, 4)
        speeds: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(arguments.rounds):
            for name, worker in workers.items():
                speeds[name].append(worker.run(prompts, arguments.output_tokens))
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        rows.append({"streams": streams, **medians, "ratio": medians["jaxllm"] / medians["transformers"]})
        print(
            "{streams:3} streams: transformers {transformers:6.1f} tok/s, jaxllm {jaxllm:6.1f}, {ratio:.2f}x".format(
                **rows[-1]
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers-python")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--model-file", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(WORKERS[arguments.worker], arguments.model_file)
    if not arguments.transformers_python:
        parser.error("--transformers-python is missing: the Python of an environment with torch and transformers")
    hub = importlib.import_module("jaxllm.models.hub")
    rows = measure(arguments, str(hub.resolve_model(MODEL)))
    print(json.dumps({"machine": platform.processor() or platform.machine(), "rows": rows}))


if __name__ == "__main__":
    main()
