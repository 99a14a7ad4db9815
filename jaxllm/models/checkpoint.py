"""A checkpoint: the configuration and the tensors of a model on disk, whatever the file format.

Invariant: tensors are read one at a time and only when asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.models.families import Family, NameMap
from jaxllm.models.safetensors_checkpoint import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """What a file format offers; a context manager that closes its files."""

    path: Path
    family: Family
    config: ModelConfig
    names: NameMap
    """The tensors that each parameter is made of."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor, by its name in the files."""

    def read(self, name: str) -> np.ndarray:
        """One tensor in Hugging Face's layout, linear maps as [out, in]; safe to call from several threads."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face folder; reads its configuration, no tensors.

    Raises:
        ValueError: there is no such file, it is broken or cut short, or the model is not supported.
    """
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        # Imported only here: no other format needs the gguf package.
        return importlib.import_module("jaxllm.models.gguf_checkpoint").GgufCheckpoint(path)
    raise ValueError(f"model={str(path)!r} does not exist: give a GGUF file or a Hugging Face folder")
