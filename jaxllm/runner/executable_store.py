"""Compiled executables on disk, so that the next start neither traces, lowers nor compiles.

JAX's own persistent cache skips compiling only. On a GPU it is on beside this one: it keeps the results of
autotuning, and helps when a change of source leaves the compiled program as it was. On a CPU it stays off,
because there an executable that came out of it cannot be stored again: it would lose functions.
A stored executable is used only where everything it depends on is equal: sources, versions, devices,
processor, shapes, flags.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxllm.cache_dir import cache_dir

logger = logging.getLogger(__name__)

STEP_SOURCES = ("kernels", "models", "parallel", "runner")
VERSIONED = ("jax", "flax", "nvidia-cudnn", "nvidia-cublas", "nvidia-nccl")
"""Packages, by the beginning of their names, whose versions executables depend on."""
UNREADABLE = (
    *(OSError, ValueError, EOFError, AttributeError, ImportError, LookupError, TypeError),
    *(pickle.UnpicklingError, jax.errors.JaxRuntimeError),
)


class ExecutableStore:
    """One folder of executables that share a key. Files are private to the user: loading one runs it."""

    def __init__(self, devices: Sequence[Any], facts: Sequence[Any]):
        """`facts`: what the executables depend on besides sources, versions and devices; by its repr."""
        self.devices = list(devices)
        key = hashlib.sha256("\n".join([*_surroundings(devices), *map(repr, facts)]).encode())
        self.folder = cache_dir() / "executables" / key.hexdigest()[:32]

    def load(self, name: str, args: Any, outputs: Any) -> jax.stages.Compiled | None:
        """The stored executable, or None; `args` and `outputs` are pytrees of its signature."""
        path = self.folder / name
        if not path.exists():
            return None
        trees = jax.tree.structure((args, {})), jax.tree.structure(outputs)
        try:
            payload = _checked(path.read_bytes())
            client = self.devices[0].client
            return serialize_executable.deserialize_and_load(payload, *trees, client, self.devices)
        except UNREADABLE as error:
            logger.warning("stored executable %s is unreadable, compiling it again: %s", path, error)
            return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Writes atomically; failing to write costs the next start time, nothing else."""
        try:
            payload, _, _ = serialize_executable.serialize(compiled)
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete_on_close=False) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
                file.close()
                os.replace(file.name, self.folder / name)
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            logger.warning("cannot store the executable %s: %s", name, error)


def may_store(platform: str) -> bool:
    """False where a cache that the user gave JAX would make stored executables unusable (on a CPU, see above)."""
    return platform != "cpu" or jax.config.jax_compilation_cache_dir is None


def enable_compilation_cache(platform: str) -> None:
    """Turns on JAX's persistent cache below the cache folder, unless the user configured one."""
    if platform != "cpu" and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _checked(data: bytes) -> bytes:
    """What follows the checksum: XLA ends the process over some kinds of damage."""
    size = hashlib.sha256().digest_size
    if hashlib.sha256(data[size:]).digest() != data[:size]:
        raise ValueError("its checksum does not match")
    return data[size:]


def _surroundings(devices: Sequence[Any]) -> list[str]:
    names = (item.name or "" for item in importlib.metadata.distributions())  # a broken one has no name
    versions = sorted(f"{name} {importlib.metadata.version(name)}" for name in set(names) if name.startswith(VERSIONED))
    settings = [f"{name}={value}" for name, value in sorted(jax.config.values.items())]
    kinds = [f"{device.platform} {device.device_kind} {device.id}" for device in devices]
    flags = [os.environ.get("XLA_FLAGS", ""), devices[0].client.platform_version, _processor()]
    return [SOURCE_HASH, *versions, *settings, *kinds, *flags]


def _source_hash() -> str:
    """Hash of the sources a compiled step is made from; others may change without a new compilation."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in (root, *(root / name for name in STEP_SOURCES)):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCE_HASH = _source_hash()
"""Of the sources as they were imported, not as they may have been edited since."""


def _processor() -> str:
    """Name and features of the processor: code compiled for one may not run on another."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}"
    lines = info.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
