"""Prints, as JSON, what XLA makes of the programs that copy K/V blocks of an 8B model, on one H200 and on two.

Run by test_deviceless_swap.py, with a Python that has what `h200` needs.
"""

from __future__ import annotations

import json
import warnings

import h200
import jax
import jax.numpy as jnp
from compiled_text import large_copies

from jaxllm.memory import CacheSize
from jaxllm.models.attention import LayerCache
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.parallel.sharding import KV_CACHE_AXES, named_sharding
from jaxllm.runner.host_memory import HostMemory, chunk_blocks

BLOCKS, BLOCK_SIZE, LAYERS = 4096, 16, 32
SHAPE = (BLOCKS, BLOCK_SIZE, 8, 128)


def describe(devices: int) -> dict[str, dict[str, object]]:
    """The facts of both programs."""
    mesh = h200.make_mesh(TENSOR_AXIS, devices)
    spec = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=named_sharding(mesh, KV_CACHE_AXES))
    cache = tuple(LayerCache(spec, spec) for _ in range(LAYERS))
    memory = HostMemory(cache, CacheSize(BLOCKS, BLOCK_SIZE, 1, chunk_blocks(BLOCK_SIZE)), staged=1)
    described = {}
    with h200.lowering_for(mesh):
        for name, program in (("out", memory._gather), ("in", memory._scatter)):
            text, sizes = program.as_text(), program.memory_analysis()
            described[name] = {
                "fusions": text[text.index("ENTRY") :].count(" fusion("),
                "copies": large_copies(text, BLOCKS * BLOCK_SIZE * 8 * 128 // devices),
                "collectives": sum(text.count(f" {kind}") for kind in ("all-", "collective-")),
                "temp": sizes.temp_size_in_bytes,
                "output": sizes.output_size_in_bytes,
                "alias": sizes.alias_size_in_bytes,
            }
    return described


def main() -> None:
    warnings.simplefilter("ignore")
    print(json.dumps({str(devices): describe(devices) for devices in (1, 2)}))


if __name__ == "__main__":
    main()
