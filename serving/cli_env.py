"""`jaxllm env`: what a report of a bug needs, as text to paste or as JSON.

The invariant: a probe that fails says so in its place and the others are printed; no secret is printed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from jaxllm.bench.host import cpu_model
from jaxllm.cache_dir import cache_dir
from jaxllm.serving.cli_small_commands import Env

type Finding = str | list[str] | dict[str, str]

_PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "tokenizers", "safetensors", "gguf",
    "huggingface_hub", "transformers", "triton", "jax-triton",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(JAX|XLA|JAXLLM|CUDA|NCCL|HF|TF_CPP|TPU)_\w+|NVIDIA_VISIBLE_DEVICES|LD_LIBRARY_PATH|LD_PRELOAD|OMP_NUM_THREADS"
)
_SECRETS = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL")
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_MAX_SECONDS = 120


def run(command: Env) -> None:
    report = {name: _try(probe) for name, probe in PROBES.items()}
    if command.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return
    for name, finding in report.items():
        print("\n".join(_format(name, finding)))


def _try(probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - the report has to come where something is broken, whatever it is
        return f"failed: {type(error).__name__}: {error}"


def _format(name: str, finding: Finding) -> list[str]:
    if isinstance(finding, str):
        return [f"{name}: {finding}"]
    if isinstance(finding, dict):
        finding = [f"{key}: {value}" for key, value in finding.items()]
    return [f"{name}:", *(f"  {line}" for line in finding or ["none"])]


def find_versions() -> Finding:
    return {"jaxllm": _version("jaxllm"), "python": platform.python_version()} | {
        name: _version(name) for name in _PACKAGES
    }


def find_system() -> Finding:
    name = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    return f"{name}, {platform.platform()}"


def find_cpu() -> Finding:
    return f"{cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"


def find_memory() -> Finding:
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: int(size.split()[0]) * 1024 for name, size in (line.split(":") for line in lines)}
    return f"{_show_size(sizes['MemTotal'])}, {_show_size(sizes['MemAvailable'])} available{_memory_limit()}"


def find_devices() -> Finding:
    # Without preallocation, the report takes no memory from what runs on a GPU already.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return json.loads(_output_of([sys.executable, "-m", "jaxllm.serving.device_report"], environment))


def find_gpu_driver() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return _output_of(query, os.environ).splitlines()
    except FileNotFoundError:
        return "there is no nvidia-smi"


def find_variables() -> Finding:
    return {
        name: "(set, not shown)" if _SECRETS.search(name) else _LOGIN_IN_URL.sub("***@", value)
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name)
    }


def find_cache() -> Finding:
    folder = cache_dir()
    if not folder.is_dir():
        return f"{_hide_home(folder)}, does not exist yet"
    sizes = [_size_of(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names]
    return f"{_hide_home(folder)}, {len(sizes)} {'file' if len(sizes) == 1 else 'files'}, {_show_size(sum(sizes))}"


PROBES: Mapping[str, Callable[[], Finding]] = {
    "versions": find_versions,
    "system": find_system,
    "cpu": find_cpu,
    "memory": find_memory,
    "devices": find_devices,
    "gpu driver": find_gpu_driver,
    "environment variables": find_variables,
    "cache folder": find_cache,
}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory_limit() -> str:
    """The limit that a container sets."""
    path = Path("/sys/fs/cgroup/memory.max")
    limit = path.read_text().strip() if path.is_file() else "max"
    return "" if limit == "max" else f", limited to {_show_size(int(limit))}"


def _output_of(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_MAX_SECONDS)
    if done.returncode:
        # Of a traceback, the error and the line before it, which says more where the error has no text.
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {' | '.join(lines[-2:])}")
    return done.stdout.strip()


def _hide_home(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # deleted since it was listed
        return 0


def _show_size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
