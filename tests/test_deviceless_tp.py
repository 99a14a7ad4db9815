"""Steps that several H200s share, compiled on a machine without one: what crosses between the devices, and the memory.

See test_deviceless.py for what this needs.
"""

import pytest
from deviceless_tp import CASES
from test_deviceless import needs_plugin, run

LAYERS = 2
"""Of each model are compiled: one is like the other."""
BLOCK_TOKENS, BLOCKS, ITEMSIZE = 16, 20480, 2
SIZES = {"8b": (32, 4096, 32, 8, 14336), "70b": (80, 8192, 64, 8, 28672)}
"""Layers, hidden size, query heads, K/V heads, intermediate size."""
HEAD_DIM, VOCAB = 128, 128256

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module")
def steps():
    described = run("deviceless_tp.py", str(LAYERS))
    return {tuple(step["case"]): step for step in described}


@needs_plugin
@each_case
def test_what_crosses_between_devices(steps, case):
    """Two sums a layer and that of the embedding; the logits are brought together, and nothing else."""
    step = steps[case]
    assert step["collectives"] == {"all-reduce": 2 * step["layers"] + 1, "all-gather": 1}


@needs_plugin
@each_case
def test_a_device_holds_its_share(steps, case):
    name, size, _ = case
    layers, hidden, heads, kv_heads, intermediate = SIZES[name]
    layer = hidden * HEAD_DIM * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate
    norms = 4 * (2 * layers + 1) * hidden
    assert steps[case]["weights"] == ITEMSIZE * (layers * layer + 2 * VOCAB * hidden) // size + norms
    tokens = BLOCKS * BLOCK_TOKENS
    assert steps[case]["cache"] == ITEMSIZE * tokens * 2 * layers * kv_heads * HEAD_DIM // size


@needs_plugin
@each_case
def test_the_step_takes_what_is_held_and_little_more(steps, case):
    step = steps[case]
    assert 0 <= step["arguments"] - step["held"] < 1 << 20
    assert step["copies"] == []
    # The logits of 64 rows are 33 MB, as they come and as they are used.
    assert step["temp"] < 150_000_000


@needs_plugin
@each_case
def test_how_many_graphs_a_step_has(steps, case):
    """XLA's own kernels are launched between graphs, one after each sum; NCCL's are part of one graph."""
    step, nccl = steps[case], case[2]
    if nccl:
        assert (step["num_graphs"], step["outside"]) == (1, [])
    else:
        sums = 2 * step["layers"] + 1
        assert step["outside"].count("kCollectiveKernel") == sums
        assert sums <= step["num_graphs"] <= sums + 6
