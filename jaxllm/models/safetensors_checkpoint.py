"""A Hugging Face folder as a checkpoint: config.json and one or several safetensors files.

The files are mapped, not read: `read` costs no memory of its own. (The safetensors package cannot give
bfloat16 as numpy, and the format is a JSON header before plain arrays.)
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.models.families import Family, NameMap, family_of_hf
from jaxllm.models.hf_config import StoredDType
from jaxllm.models.hf_folder import read_config, read_sampling_defaults, weight_files

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
}
_STORED: Mapping[str, StoredDType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LENGTH_BYTES = 8


class _Tensor(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsCheckpoint:
    """An open Hugging Face folder.

    Raises:
        ValueError: a file is missing, broken or cut short, or the model is not supported.
    """

    path: Path
    family: Family
    config: ModelConfig
    names: NameMap
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor, by its name in the files."""

    def __init__(self, path: Path):
        self.path = path
        fields = read_config(path)
        self._tensors = {name: t for file in weight_files(path) for name, t in _read_header(file).items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        try:
            self.family = family_of_hf(fields.get("architectures") or ())
            self.config = dataclasses.replace(self._read_config(fields), sampling_defaults=read_sampling_defaults(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.names = self.family.hf_names
        self._maps: dict[Path, np.ndarray] | None = {}

    def read(self, name: str) -> np.ndarray:
        """One tensor in the type it is stored in: a read-only view of the file."""
        assert self._maps is not None, f"{self.path} was closed"
        tensor = self._tensors[name]
        if tensor.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ValueError(f"{tensor.file}: tensor {name!r} is {tensor.dtype}, not supported: {known} are")
        if tensor.file not in self._maps:
            self._maps[tensor.file] = np.memmap(tensor.file, mode="r")
        raw = self._maps[tensor.file][tensor.start : tensor.stop]
        return raw.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)

    def close(self) -> None:
        """Lets go of the files; arrays that were read stay valid."""
        self._maps = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read_config(self, fields: Mapping[str, Any]) -> ModelConfig:
        config = self.family.config_from_hf(fields)
        if fields.get("dtype") or fields.get("torch_dtype"):
            return config
        kinds = {tensor.dtype for tensor in self._tensors.values()}
        stored = _STORED.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
        return dataclasses.replace(config, dtype=stored)


def _read_header(file: Path) -> dict[str, _Tensor]:
    """Where every tensor of a safetensors file lies."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        begin = _LENGTH_BYTES + length
        if begin > size:
            raise ValueError(f"{file} is broken: its header does not fit in its {size} bytes. Download it again")
        header = stream.read(length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(file, begin, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is broken: its header is not safetensors' ({error}). Download it again") from error
    for name, tensor in tensors.items():
        _check_extent(name, tensor, size)
    return tensors


def _tensor(file: Path, begin: int, entry: Mapping[str, Any]) -> _Tensor:
    start, stop = entry["data_offsets"]
    return _Tensor(file, entry["dtype"], tuple(entry["shape"]), begin + start, begin + stop)


def _check_extent(name: str, tensor: _Tensor, size: int) -> None:
    if tensor.stop > size:
        finding = f"tensor {name!r} ends at byte {tensor.stop}, the file at {size}"
        raise ValueError(f"{tensor.file} is cut short: {finding}. Remove it and download it again")
    expected = math.prod(tensor.shape) * _DTYPES[tensor.dtype].itemsize if tensor.dtype in _DTYPES else None
    if expected not in (None, tensor.stop - tensor.start):
        raise ValueError(f"{tensor.file} is broken: tensor {name!r} has the wrong size. Download it again")
