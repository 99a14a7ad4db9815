"""What XLA makes of the GPU's programs, compiled for an H200 on a machine without one.

The compiling is done by programs with a Python that has the CUDA plugin; scripts/test-deviceless makes that
environment. Elsewhere those tests are skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from compiled_text import distances, large_copies, read_launches
from deviceless_kernels import CASES, TOO_LARGE

TESTS = Path(__file__).resolve().parent
VARIABLE = "JAXLLM_DEVICELESS_PYTHON"
DEFAULT_PYTHON = TESTS.parent / ".venv-deviceless" / "bin" / "python"

needs_plugin = pytest.mark.skipif(
    VARIABLE not in os.environ and not DEFAULT_PYTHON.exists(),
    reason=f"needs JAX's CUDA plugin: run scripts/test-deviceless once, or name a Python that has it in {VARIABLE}",
)

MOST_TEMP = {
    "decode-1": 2_300_000,
    "decode-64": 124_000_000,
    "decode-64, 8 steps": 124_000_000,
    "mixed-8192": 970_000_000,
    "decode-64, invariant": 124_000_000,
    "mixed-8192, invariant": 970_000_000,
}
"""Bytes of temporaries: a quarter above 1.84, 98.8 and 776 MB, as measured when this was written."""
KERNELS_PER_LAYER = {"decode": 10, "mixed": 11}
"""Norm, product, rotation and write, attention, its fold, that of chunks (in mixed steps), product; norm, product,
SwiGLU, product."""

each_step = pytest.mark.parametrize("name", MOST_TEMP)


def run(program, *arguments):
    """What a program prints; its Python knows no path but this checkout's."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [os.environ.get(VARIABLE, str(DEFAULT_PYTHON)), TESTS / program, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def compiled():
    return run("deviceless_steps.py")


@pytest.fixture(scope="module")
def steps(compiled):
    return compiled["steps"]


@pytest.fixture(scope="module")
def examples(compiled):
    return compiled["examples"]


@pytest.fixture(scope="module")
def errors():
    return run("deviceless_kernels.py")


@needs_plugin
@each_step
def test_a_step_is_one_cuda_graph(steps, name):
    step = steps[name]
    assert step["num_graphs"] == 1
    # A loop over steps may lie around the graph, and copies of its counters.
    assert set(step["outside"]) <= {"kWhile", "kCopy"}


@needs_plugin
@each_step
def test_the_cache_and_the_state_are_written_in_place(steps, name):
    step = steps[name]
    assert step["copies"] == []
    assert step["alias"] == step["donated"]


@needs_plugin
@each_step
def test_temporaries_are_few(steps, name):
    assert steps[name]["temp"] < MOST_TEMP[name]


@needs_plugin
@each_step
def test_how_many_kernels_a_layer_has(steps, name):
    # Ahead of the second layer's there is the preparation of attention in the first one.
    assert set(steps[name]["per_layer"][1:]) == {KERNELS_PER_LAYER[name.partition("-")[0]]}


@needs_plugin
@each_step
def test_only_the_invariant_mode_has_products_of_its_own(steps, name):
    kernels = steps[name]["in_graphs"]
    own = [kernel for kernel in kernels if kernel.startswith("invariant_linear")]
    libraries = [kernel for kernel in kernels if "gemm" in kernel.lower() or "cublas" in kernel.lower()]
    assert (len(own) > 0, len(libraries) > 0) == (("invariant" in name), ("invariant" not in name))


@needs_plugin
def test_what_breaks_a_graph_or_copies_is_seen(examples):
    assert (examples["whole"]["num_graphs"], examples["whole"]["outside"]) == (1, [])
    assert (examples["loop"]["num_graphs"], examples["loop"]["outside"]) == (3, ["kWhile"])
    assert len(examples["loop"]["in_graphs"]) == 3 * len(examples["whole"]["in_graphs"])
    assert (len(examples["donated"]["copies"]), examples["donated"]["alias"]) == (0, 64 * 16 * 8 * 4)
    assert (len(examples["not donated"]["copies"]), examples["not donated"]["alias"]) == (1, 0)


@needs_plugin
@pytest.mark.parametrize("name", sorted(set(CASES) - {TOO_LARGE}))
def test_the_kernel_compiles(errors, name):
    assert errors[name] == ""


@needs_plugin
def test_a_kernel_that_cannot_run_does_not_compile(errors):
    assert "Shared memory size limit exceeded" in errors[TOO_LARGE]


THUNKS = """\
001: kCopy  [source       | next=003 (2)] kCopy
003: kWhile [prev=002 (1) | sink        ]   
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink] 
        005: kCustomKernel [source       | next=007 (1)] rotate_and_write grid: [1, 1, 1] threads: [1
        008: kConditional  [prev=347 (1)   | next=370 (1)]       
          branch_0:
            No thunks.      branch_1:
            009: kCustomKernel [source       | next=351 (3)] draw grid: [1, 1, 1] threads: [1, 1, 1]
        010: kCustomKernel [source       | next=007 (1)] rotate_and_write__1 grid: [1, 1, 1] threads: [1
010: kCustomKernel [prev=003 (1) | sink        ] late grid: [512, 1, 1] threads: [128, 1, 1]
"""  # noqa: W291 - as XLA writes it


def test_reading_launches():
    launches = read_launches(THUNKS)
    assert launches.num_graphs == 1
    assert launches.in_graphs == ["rotate_and_write", "kConditional", "draw", "rotate_and_write__1"]
    assert launches.outside == ["kCopy", "kWhile", "late"]
    assert distances(launches.in_graphs, "rotate") == [3]


@pytest.mark.parametrize(
    ("line", "is_large"),
    [
        ("%copy.3 = f32[64,16,8]{2,1,0} copy(%a_0_.1)", True),
        ("%copy.3 = bf16[1024,8]{1,0} copy(%bitcast.1)", True),
        ("%s = (f32[64,16,8]{2,1,0}, f32[64,16,8]{2,1,0}, u32[]) copy-start(%a)", True),
        ("%copy.4 = s32[] copy(%get-tuple-element.3)", False),
        ("%copy.4 = f32[63,16,8]{2,1,0} copy(%a)", False),
        ("%f = f32[64,16,8]{2,1,0} fusion(%copy.3, %a_1_.1), kind=kInput, calls=%copy_fusion", False),
    ],
)
def test_finding_large_copies(line, is_large):
    assert bool(large_copies(f"HloModule m\n  {line}\n", 64 * 16 * 8)) is is_large
