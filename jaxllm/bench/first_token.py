"""A process that makes an engine and one token: `python -m jaxllm.bench.first_token`, with the engine's fields as JSON.

Invariant: it does nothing before the first token that a user's program would not do. One line says that the token
is there, the next one on what machine, and how long its parts took.
"""

from __future__ import annotations

import time

_started = time.perf_counter()

import json  # noqa: E402 - the time of the imports is measured
import sys  # noqa: E402

from jaxllm import LLM, SamplingParams  # noqa: E402
from jaxllm.bench.report import describe_machine  # noqa: E402

FIRST_TOKEN = "first token"
PROMPT = "The capital of France is"


def main() -> None:
    imported = time.perf_counter()
    with LLM(**json.loads(sys.argv[1])) as llm:
        ready = time.perf_counter()
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        print(FIRST_TOKEN, flush=True)
        answered = time.perf_counter()
        parts = {"imports_s": imported - _started, "engine_s": ready - imported, "answer_s": answered - ready}
        machine = describe_machine(llm.engine.core.runner.mesh.devices.flat)
    print(json.dumps({"parts": parts, "machine": machine}))


if __name__ == "__main__":
    main()
