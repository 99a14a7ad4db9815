"""What the sources of kernels must not have, as it goes wrong on a GPU alone."""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "kernels"


def choices_between_constants(source: str) -> list[int]:
    """Lines of kernel bodies where `jnp.where` has the choice between two Python numbers.

    Pallas' Triton lowering gives both the type of the condition if that is a scalar: 2 becomes False.
    """
    kernels = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and "kernel" in node.name
    )
    calls = (node for kernel in kernels for node in ast.walk(kernel) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "where" and all(map(is_constant, call.args[1:]))
    ]


def is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return is_constant(node.operand)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.stem)
def test_kernels_choose_between_arrays(path):
    assert not choices_between_constants(path.read_text())


def test_the_check_sees_a_choice_between_constants():
    source = "def a_kernel(x, out):\n    def inner():\n        out[0] = jnp.where(x[0] < 1, -2, NOTHING)\n"
    assert choices_between_constants(source) == [3]
    assert not choices_between_constants("def a_kernel(x):\n    return jnp.where(x > 0, x, 0)\n")
