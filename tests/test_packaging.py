"""What a user installs: the wheel's names, and that no top-level `kernels` or `serving` comes with it."""

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "serving")
OPTIONAL_DEPENDENCIES = {
    *("triton", "jax_triton", "transformers", "aiohttp", "matplotlib"),
    *("starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "msgspec"),
}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    """Names in a wheel that is built from a copy of the sources: a build leaves files beside them."""
    source = tmp_path_factory.mktemp("source")
    for name in ("jaxllm", *LINKED):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    result = subprocess.run([*command, "--wheel-dir", target, source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.parametrize("folder", LINKED)
def test_the_wheel_has_the_linked_folder_inside_jaxllm(wheel_names, folder):
    expected = {f"jaxllm/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    assert expected
    assert expected <= set(wheel_names)


def test_the_wheel_has_every_module_of_jaxllm(wheel_names):
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxllm").rglob("*.py")}
    assert expected <= set(wheel_names)


def test_the_wheel_has_the_files_that_are_no_modules(wheel_names):
    assert {"jaxllm/kernels/launches.json", "jaxllm/profiling/timeline.html"} <= set(wheel_names)


def test_the_wheel_has_nothing_but_jaxllm_at_its_top(wheel_names):
    version = importlib.metadata.version("jaxllm")
    assert {name.split("/")[0] for name in wheel_names} == {"jaxllm", f"jaxllm-{version}.dist-info"}
    assert not [name for name in wheel_names if "__pycache__" in name]


def test_the_wheel_has_the_licence_and_the_command(wheel_names):
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in wheel_names)
    assert any(name.endswith("dist-info/entry_points.txt") for name in wheel_names)


@pytest.mark.parametrize("folder", LINKED)
def test_the_links_are_relative_links(folder):
    assert os.readlink(ROOT / "jaxllm" / folder) == f"../{folder}"


@pytest.mark.parametrize("folder", [*LINKED, "tests"])
def test_no_folder_at_the_top_is_a_package(folder):
    assert not list((ROOT / folder).rglob("__init__.py"))


@pytest.mark.parametrize("folder", LINKED)
def test_an_installed_jaxllm_adds_no_top_level_name(tmp_path, folder):
    """Run elsewhere, as a user would: transformers and others probe for Hugging Face's package `kernels`."""
    script = (
        f"import importlib.util as u; s = u.find_spec({folder!r}); print(*(s.submodule_search_locations if s else []))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(ROOT) not in result.stdout


def module_names():
    """Dotted names of every module; the linked folders are walked at their own place, as links are not followed."""
    sources = [path.relative_to(ROOT) for path in (ROOT / "jaxllm").rglob("*.py")]
    sources += ["jaxllm" / path.relative_to(ROOT) for folder in LINKED for path in (ROOT / folder).rglob("*.py")]
    dotted = (path.with_suffix("").as_posix().replace("/", ".") for path in sources)
    return sorted(name for name in dotted if not name.endswith(("__init__", "__main__")))


@pytest.mark.smoke
@pytest.mark.parametrize("name", module_names())
def test_every_module_can_be_imported(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_DEPENDENCIES:
            raise
        pytest.skip(f"needs the optional {error.name}")
