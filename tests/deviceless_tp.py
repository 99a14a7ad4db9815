"""Prints, as JSON, what XLA makes of steps that several H200s share. Run by test_deviceless_tp.py.

With an argument: only the first so many layers of each model are compiled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import h200
from deviceless_steps import CONFIG, MODEL, Dumps

from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.parallel.partition import split_over
from jaxllm.runner import fitting
from jaxllm.runner.model_runner import ModelRunner

MODELS = {
    "8b": MODEL,
    "70b": dataclasses.replace(MODEL, num_layers=80, hidden_size=8192, num_heads=64, intermediate_size=28672),
}
CASES = [("8b", 2, False), ("8b", 2, True), ("8b", 8, True), ("70b", 2, True), ("70b", 8, False)]
"""Model, number of devices, and whether NCCL adds up."""
BUCKET = "decode-64"
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|collective-\w+|all-to-all)(-start)?\(")


def describe(name: str, size: int, nccl: bool, most_layers: int, dumps: Dumps) -> dict[str, object]:
    """What a decode step of a model is on several devices; bytes are those of one device."""
    mesh = h200.make_mesh(TENSOR_AXIS, size)
    config = dataclasses.replace(CONFIG, tensor_parallel_size=size, disable_custom_all_reduce=nccl)
    whole = split_over(MODELS[name], size)
    model = dataclasses.replace(whole, num_layers=min(most_layers, whole.num_layers))
    runner = ModelRunner(config, model, mesh)
    (bucket,) = (bucket for bucket in runner.programs.ladder.all if bucket.name == BUCKET)
    with h200.lowering_for(mesh):
        compiled = runner.executables.make(bucket)
    _, cache, _ = held = runner.programs.held_bytes(runner.size)
    described = dumps.describe(compiled, cache // (2 * model.num_layers * runner.programs.dtype.itemsize))
    found = Counter(match[1] for match in _COLLECTIVE.finditer(compiled.as_text()))
    weights, cache, _ = ModelRunner(config, whole, mesh).programs.held_bytes(runner.size)
    return {
        **described,
        "case": [name, size, nccl],
        "layers": model.num_layers,
        "collectives": found,
        "held": sum(held),
        "arguments": compiled.memory_analysis().argument_size_in_bytes,
        "weights": weights,
        "cache": cache,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    fitting.memory_limit = lambda *_: None  # nothing will be allocated
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        dumps = Dumps(Path(folder))
        most_layers = int(sys.argv[1]) if len(sys.argv) > 1 else sys.maxsize
        print(json.dumps([describe(*case, most_layers, dumps) for case in CASES]))


if __name__ == "__main__":
    main()
