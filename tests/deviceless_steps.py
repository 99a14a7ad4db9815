"""Prints, as JSON, what XLA makes of an 8B model's steps on an H200. Run by test_deviceless.py, with a Python that has
what `h200` needs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import warnings
from pathlib import Path

import h200
import jax
import jax.numpy as jnp
from compiled_text import distances, large_copies, read_launches

from jaxllm.config import EngineConfig
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.runner import fitting
from jaxllm.runner.model_runner import ModelRunner

MODEL = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_position_embeddings=131072,
    dtype="bfloat16",
)
CONFIG = EngineConfig(
    "llama-3.1-8b",
    dtype="bfloat16",
    max_model_len=2048,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    num_gpu_blocks_override=20480,
    compilation_cache=False,
)
STEPS = {
    "decode-1": ("decode-1", 32, {}),
    "decode-64": ("decode-64", 32, {}),
    "decode-64, 8 steps": ("decode-64", 4, {"num_scheduler_steps": 8}),
    "mixed-8192": ("mixed-8192", 4, {}),
    "decode-64, invariant": ("decode-64", 4, {"batch_invariant": True}),
    "mixed-8192, invariant": ("mixed-8192", 4, {"batch_invariant": True}),
}
"""Buckets, how many layers of the model are compiled, and what else differs from CONFIG."""


class Dumps:
    """The folder where XLA writes about every program it compiles."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.seen: set[Path] = set()

    def describe(self, compiled: jax.stages.Compiled, cache_elements: int) -> dict[str, object]:
        """What this program, compiled last, does."""
        files = set(self.folder.glob("*thunk_sequence*.txt")) - self.seen
        self.seen |= files
        # Passes that have nothing to do write no file of their own.
        last = max(files, key=lambda file: ("after_thunk_passes" in file.name, file.stat().st_size))
        launches = read_launches(last.read_text())
        memory = compiled.memory_analysis()
        return {
            **launches._asdict(),
            "per_layer": distances(launches.in_graphs, "rotate_and_write"),
            "copies": large_copies(compiled.as_text(), cache_elements),
            "temp": memory.temp_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
        }


def describe_steps(mesh, dumps: Dumps) -> dict[str, dict[str, object]]:
    """The facts of each of STEPS, by bucket."""
    fitting.memory_limit = lambda *_: None  # nothing will be allocated
    described = {}
    for name, (bucket_name, num_layers, changes) in STEPS.items():
        config, model = dataclasses.replace(CONFIG, **changes), dataclasses.replace(MODEL, num_layers=num_layers)
        runner = ModelRunner(config, model, mesh)
        (bucket,) = (bucket for bucket in runner.programs.ladder.all if bucket.name == bucket_name)
        with h200.lowering_for(mesh):
            compiled = runner.executables.make(bucket)
        _, cache, state = runner.programs.held_bytes(runner.size)
        elements = cache // (2 * num_layers * runner.programs.dtype.itemsize)
        described[name] = {**dumps.describe(compiled, elements), "donated": cache + state, "array": elements * 2}
    return described


def describe_examples(mesh, dumps: Dumps) -> dict[str, dict[str, object]]:
    """Programs that do what a step must not."""
    square, cache, slot = (h200.array(mesh, shape) for shape in ((256, 256), (64, 16, 8), (8,)))

    def layers(x, weight):
        for _ in range(6):
            x = jnp.tanh(x @ weight)
        return x

    def loop(x, weight):
        x = layers(x, weight)
        x = jax.lax.while_loop(lambda x: x.max() > 1, lambda x: layers(x, weight), x)
        return layers(x, weight)

    def write(cache, slot):
        return cache.at[3, 5].set(slot)

    jitted = {
        "whole": (jax.jit(layers), square, square),
        "loop": (jax.jit(loop), square, square),
        "donated": (jax.jit(write, donate_argnums=0), cache, slot),
        "not donated": (jax.jit(write), cache, slot),
    }
    described = {}
    for name, (function, *arguments) in jitted.items():
        with h200.lowering_for(mesh):
            compiled = function.lower(*arguments).compile()
        described[name] = dumps.describe(compiled, 64 * 16 * 8)
    return described


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        mesh = h200.make_mesh(TENSOR_AXIS)
        dumps = Dumps(Path(folder))
        print(json.dumps({"steps": describe_steps(mesh, dumps), "examples": describe_examples(mesh, dumps)}))


if __name__ == "__main__":
    main()
