"""The structure the README promises: who may import whom, and how large a file or function may be.

Read from the source with ast; nothing is imported.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    ("config", "model_config", "sampling_params", "request", "outputs", "memory", "cache_dir", "logs", "kernels"),
    ("scheduling", "parallel"),
    ("models",),
    ("runner",),
    ("profiling",),
    ("engine",),
    ("debug",),
    ("llm",),
    ("bench",),
    ("serving", "__init__", "__main__"),
)
"""Parts of jaxllm, lowest layer first. A part imports lower layers and itself, plain values also one another."""

PLAIN_VALUES = {"config", "model_config", "sampling_params", "request", "outputs", "memory", "cache_dir", "logs"}
LAYER_OF = {part: level for level, parts in enumerate(LAYERS) for part in parts}

IMPORTERS_OF_SCHEDULING = {"scheduling", "engine", "debug"}
IMPORTERS_OF_RUNNER = {"runner", "profiling", "engine"}
SHARED_WITH_THE_RUNNER = "jaxllm.scheduling.plan"
TIMED_ALONE = (
    "jaxllm.runner.sampler",
    "jaxllm.runner.device_state",
    "jaxllm.runner.logit_changes",
    "jaxllm.runner.annotations",
)
"""The parts of the runner that a benchmark calls by themselves."""

WITHOUT_JAX = PLAIN_VALUES | {"scheduling"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "numpy"}
KERNELS_MAY_IMPORT = {"jax", "jaxlib", "jaxtyping", "numpy", "triton", "jax_triton"} | sys.stdlib_module_names

OPTIONAL_DEPENDENCIES = {"triton", "jax_triton", "starlette", "uvicorn", "pydantic", "msgspec", "transformers"}
"""What pyproject.toml installs through extras: the only imports allowed inside functions."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_FUNCTION_LINES = 120


SOURCES = sorted(path for folder in ("jaxllm", "kernels", "serving") for path in (ROOT / folder).rglob("*.py"))
"""Links are not followed: what is below jaxllm/kernels and jaxllm/serving is met once, at its own place."""

each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))


def part_of(path):
    """The first name below jaxllm: `scheduling` for jaxllm/scheduling/plan.py, `kernels` for kernels/x.py."""
    names = path.relative_to(ROOT).with_suffix("").parts
    return names[1] if names[0] == "jaxllm" else names[0]


def parse(path):
    return ast.parse(path.read_text(), str(path))


def imported_modules(tree):
    """Dotted names of everything a tree imports; `from a import b` counts as a.b, as b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole name"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def imported_parts(tree):
    """(part, module) of everything imported from jaxllm; a name taken from jaxllm itself counts as `__init__`."""
    for module in imported_modules(tree):
        root, *rest = module.split(".")
        if root == "jaxllm":
            part = rest[0] if rest and rest[0] in LAYER_OF else "__init__"
            yield part, module


def functions(tree):
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_allowed(importer, imported, module):
    if imported == importer:
        return True
    if imported == "scheduling" and importer == "runner":
        return module.startswith(SHARED_WITH_THE_RUNNER)
    if imported == "runner" and importer == "bench":
        return module.startswith(TIMED_ALONE)
    if imported == "scheduling" and importer not in IMPORTERS_OF_SCHEDULING:
        return False
    if imported == "runner" and importer not in IMPORTERS_OF_RUNNER:
        return False
    if imported in PLAIN_VALUES and importer in PLAIN_VALUES:
        return True
    if importer == "kernels":
        return False
    if imported == "__init__":
        return importer in {"bench", "serving", "__main__"}
    return LAYER_OF[imported] < LAYER_OF[importer]


def test_the_sources_are_found():
    assert len(SOURCES) > 10
    assert not [path for path in SOURCES if path.is_symlink()]


@each_source
def test_every_part_has_a_layer(path):
    assert part_of(path) in LAYER_OF, f"give {part_of(path)} a place in LAYERS"


@each_source
def test_only_lower_layers_are_imported(path):
    wrong = [module for part, module in imported_parts(parse(path)) if not is_allowed(part_of(path), part, module)]
    assert not wrong


@each_source
def test_third_parties_are_imported_only_where_they_belong(path):
    roots = {module.split(".")[0] for module in imported_modules(parse(path))} - {"jaxllm"}
    if part_of(path) in PLAIN_VALUES:
        assert roots <= sys.stdlib_module_names
    if part_of(path) in WITHOUT_JAX:
        assert not roots & JAX
    if part_of(path) == "kernels":
        assert roots <= KERNELS_MAY_IMPORT
    assert not roots & {"kernels", "serving"}, "write jaxllm.kernels, jaxllm.serving"


@each_source
def test_functions_import_only_optional_dependencies(path):
    wrong = []
    for function in functions(parse(path)):
        roots = {module.split(".")[0] for module in imported_modules(function)}
        wrong += [f"{function.name}: {root}" for root in sorted(roots - OPTIONAL_DEPENDENCIES)]
    assert not wrong


@each_source
def test_files_and_functions_are_small(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    most = MAX_KERNEL_FUNCTION_LINES if part_of(path) == "kernels" else MAX_FUNCTION_LINES
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions(parse(path))}
    assert not {name: length for name, length in lengths.items() if length > most}


@pytest.mark.parametrize(
    ("importer", "module", "allowed"),
    [
        ("request", "jaxllm.sampling_params.SamplingParams", True),
        ("scheduling", "jaxllm.scheduling.plan", True),
        ("scheduling", "jaxllm.kernels.copy_blocks", True),
        ("scheduling", "jaxllm.models.loader", False),
        ("runner", "jaxllm.scheduling.plan.StepPlan", True),
        ("runner", "jaxllm.scheduling.scheduler", False),
        ("models", "jaxllm.scheduling.plan", False),
        ("kernels", "jaxllm.config", False),
        ("engine", "jaxllm.runner.model_runner", True),
        ("profiling", "jaxllm.runner.model_runner", True),
        ("runner", "jaxllm.profiling.session", False),
        ("serving", "jaxllm.engine.engine", True),
        ("serving", "jaxllm.scheduling.plan", False),
        ("serving", "jaxllm.runner.model_runner", False),
        ("serving", "jaxllm.LLM", True),
        ("bench", "jaxllm.llm.LLM", True),
        ("bench", "jaxllm.kernels.ragged_paged_attention", True),
        ("bench", "jaxllm.runner.sampler.sample", True),
        ("bench", "jaxllm.runner.model_runner", False),
        ("bench", "jaxllm.scheduling.scheduler", False),
        ("engine", "jaxllm.bench.report", False),
        ("models", "jaxllm.LLM", False),
        ("llm", "jaxllm.serving.app", False),
    ],
)
def test_the_rule_itself(importer, module, allowed):
    tree = ast.parse(f"import {module}")
    ((part, name),) = imported_parts(tree)
    assert is_allowed(importer, part, name) is allowed
