"""The header of a GGUF file: its metadata and where its tensors lie.

The `gguf` package's own reader makes several numpy arrays per token of the vocabulary, which takes
seconds; this one takes about a tenth of a second. Types and block sizes are still the package's.
Invariant: a header that was returned describes tensors that lie wholly inside the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_SCALARS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_LENGTH = struct.Struct("<Q")
_NUM_TENSORS_AT = 8
"""Behind the magic number and the version."""
_ALIGNMENTS = tuple(2**power for power in range(17))


class GgufTensor(NamedTuple):
    """One tensor of a file."""

    shape: tuple[int, ...]
    """Outermost dimension first, as numpy has it (the file has it the other way round)."""
    type: GGMLQuantizationType
    start: int
    """Offset of its first byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensor data."""

    metadata: Mapping[str, Any]
    """Plain Python values: numbers, strings, booleans and lists of them."""
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a GGUF file; the last file's is kept, so config, weights and tokenizer share one read.

    Raises:
        ValueError: not a GGUF file, cut short, or of a version or a tensor type that is not supported.
    """
    status = path.stat()
    return _read_header(path.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _read_header(path: Path, size: int, mtime_ns: int) -> GgufHeader:
    del mtime_ns  # part of the cache's key: a file that was written anew is read anew
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: give a .gguf file or a Hugging Face folder")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _parse(_Cursor(data))
            except (EOFError, struct.error) as error:
                raise cut_short(path, f"its header does not fit in its {size} bytes") from error
            except _Malformed as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is damaged: its header holds a text that is no UTF-8") from error
    _check_extent(path, size, header)
    return header


def cut_short(path: Path, finding: str) -> ValueError:
    """The error for a file that ends too early."""
    return ValueError(f"{path} is cut short: {finding}. Remove it and download it again")


class _Malformed(Exception):
    """The file holds a value that this reader does not know."""


class _Cursor:
    """Reads forward through the bytes of a header; EOFError or struct.error where they end."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = len(MAGIC)

    def numbers(self, kind: str, count: int = 1) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{count}{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{kind}")
        return values

    def strings(self, count: int) -> list[str]:
        # The hot loop: a vocabulary and its merges are hundreds of thousands of strings.
        data, at, size, read_length = self.data, self.at, len(self.data), _LENGTH.unpack_from
        strings = []
        for _ in range(count):
            begin = at + _LENGTH.size
            at = begin + read_length(data, at)[0]
            if at > size:
                raise EOFError
            strings.append(data[begin:at].decode())
        self.at = at
        return strings

    def array(self, dtype: np.dtype, count: int) -> list[Any]:
        end = self.at + count * dtype.itemsize
        if end > len(self.data):
            raise EOFError
        values = np.frombuffer(self.data[self.at : end], dtype).tolist()
        self.at = end
        return values


def copy_metadata(source: Path, target: Path) -> None:
    """Writes a GGUF file with the metadata of another one, which has the tokenizer, and without tensors.

    Raises:
        ValueError: as `read_gguf_header`.
    """
    read_gguf_header(source)
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        _parse_metadata(cursor)
        copied = bytearray(data[: cursor.at])
    _LENGTH.pack_into(copied, _NUM_TENSORS_AT, 0)
    target.write_bytes(copied)


def _parse(cursor: _Cursor) -> GgufHeader:
    num_tensors, metadata = _parse_metadata(cursor)
    entries = [_parse_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if alignment not in _ALIGNMENTS:
        raise _Malformed(f"general.alignment={alignment!r} is no power of two; download or convert it again")
    base = -(-cursor.at // alignment) * alignment
    return GgufHeader(metadata, {name: tensor._replace(start=base + tensor.start) for name, tensor in entries})


def _parse_metadata(cursor: _Cursor) -> tuple[int, dict[str, Any]]:
    """Number of tensors, and everything that stands before them."""
    (version,) = cursor.numbers("I")
    if version not in VERSIONS:
        supported = " and ".join(map(str, VERSIONS))
        raise _Malformed(f"GGUF version {version} is not supported (little-endian {supported} are); convert it anew")
    num_tensors, num_fields = cursor.numbers("Q", 2)
    metadata = {}
    for _ in range(num_fields):
        (key,) = cursor.strings(1)
        metadata[key] = _parse_value(cursor, key)
    return num_tensors, metadata


def _parse_value(cursor: _Cursor, key: str) -> Any:
    kind = _value_type(cursor, key)
    if kind is GGUFValueType.ARRAY:
        kind = _value_type(cursor, key)
        (count,) = cursor.numbers("Q")
        return cursor.strings(count) if kind is GGUFValueType.STRING else cursor.array(_scalar(kind, key), count)
    return cursor.strings(1)[0] if kind is GGUFValueType.STRING else cursor.array(_scalar(kind, key), 1)[0]


def _value_type(cursor: _Cursor, key: str) -> GGUFValueType:
    (number,) = cursor.numbers("I")
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise _Malformed(f"metadata {key!r} has the unknown type {number}; download or convert it again") from error


def _scalar(kind: GGUFValueType, key: str) -> np.dtype:
    if kind not in _SCALARS:
        raise _Malformed(f"metadata {key!r} is an array of arrays, which is not supported")
    return _SCALARS[kind]


def _parse_tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """Name and tensor; its start counts from the beginning of the tensor data."""
    (name,) = cursor.strings(1)
    (num_dims,) = cursor.numbers("I")
    shape = cursor.numbers("Q", num_dims)[::-1]
    (number,) = cursor.numbers("I")
    (start,) = cursor.numbers("Q")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        remedy = "try a newer gguf package (pip install -U gguf) or another quantisation of the model"
        raise _Malformed(f"tensor {name!r} has the unknown type {number}; {remedy}") from error
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    return name, GgufTensor(shape, kind, start, math.prod(shape) // block_size * block_bytes)


def _check_extent(path: Path, size: int, header: GgufHeader) -> None:
    for name, tensor in header.tensors.items():
        end = tensor.start + tensor.num_bytes
        if end > size:
            raise cut_short(path, f"tensor {name!r} ends at byte {end}, the file at {size}")
