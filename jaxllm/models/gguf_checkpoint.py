"""A GGUF file as a checkpoint: configuration, and tensors dequantised one at a time.

Invariant: `read` gives tensors in Hugging Face's layout ([out, in], rotated pairs half a head apart),
whatever llama.cpp's converter did to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.model_config import ModelConfig
from jaxllm.models.families import Family, NameMap, family_of_gguf
from jaxllm.models.gguf_config import with_rope_tensors
from jaxllm.models.gguf_file import GgufHeader, GgufTensor, read_gguf_header
from jaxllm.models.hf_config import StoredDType

_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_STORED: Mapping[GGMLQuantizationType, StoredDType] = {
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
_ELEMENTS_AT_ONCE = 2**17
"""Few enough that the package's temporaries stay in the cache and in memory that the process already has,
many enough that its calls do not dominate: a quarter of the time of dequantising whole tensors."""


class GgufCheckpoint:
    """An open GGUF file.

    Raises:
        ValueError: not a GGUF file, cut short, in several parts, or of a model that is not supported.
    """

    path: Path
    family: Family
    config: ModelConfig
    names: NameMap
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor, by its name in the file."""

    def __init__(self, path: Path):
        header = read_gguf_header(path)
        self.path = path
        self.shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        self._tensors = header.tensors
        self._bytes: np.ndarray | None = np.memmap(path, mode="r")
        try:
            self.family = family_of_gguf(_architecture(header))
            self.config = self._read_config(header)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.names = self.family.gguf_names

    def read(self, name: str) -> np.ndarray:
        """One tensor: float32 if it is quantised, else the type it is stored in."""
        tensor = self._dequantise(name)
        correct = self.family.gguf_corrections.get(name.split(".")[-2])
        return tensor if correct is None else correct(tensor, self.config)

    def close(self) -> None:
        """Lets go of the file; arrays that were read stay valid."""
        self._bytes = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read_config(self, header: GgufHeader) -> ModelConfig:
        config = self.family.config_from_gguf(header.metadata, self.shapes)
        config = with_rope_tensors(config, self.shapes, self._dequantise)
        return dataclasses.replace(config, dtype=_stored_dtype(header))

    def _dequantise(self, name: str) -> np.ndarray:
        assert self._bytes is not None, f"{self.path} was closed"
        tensor = self._tensors[name]
        raw = self._bytes[tensor.start : tensor.start + tensor.num_bytes]
        if tensor.type in _PLAIN:
            return raw.view(_PLAIN[tensor.type]).reshape(tensor.shape)
        try:
            return _dequantise_blocks(raw, tensor)
        except NotImplementedError as error:
            remedy = "use another quantisation of the model"
            raise ValueError(f"{self.path}: tensor {name!r} is {tensor.type.name}, not supported: {remedy}") from error


def _architecture(header: GgufHeader) -> str:
    if header.metadata.get("split.count", 1) > 1:
        raise ValueError("it is one part of several: join them with llama.cpp's `llama-gguf-split --merge`")
    if "general.architecture" not in header.metadata:
        raise ValueError("metadata general.architecture is missing: give the file of a language model")
    return header.metadata["general.architecture"]


def _stored_dtype(header: GgufHeader) -> StoredDType:
    """The matrices' type if all have the same; quantised ones count as float32."""
    kinds = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return _STORED.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _dequantise_blocks(raw: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    blocks = raw.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block_size), np.float32)
    step = _ELEMENTS_AT_ONCE // block_size
    for first in range(0, len(blocks), step):
        slab = blocks[first : first + step].reshape(1, -1)
        out[first : first + step] = gguf.quants.dequantize(slab, tensor.type).reshape(-1, block_size)
    return out.reshape(tensor.shape)
