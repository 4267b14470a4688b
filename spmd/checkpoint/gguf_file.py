"""The GGUF container: metadata and the table of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own reader keeps a
numpy array for every string and takes seconds on a tokenizer's vocabulary; this one takes a tenth of one.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd.comm.errors import UserError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_SMALLEST_TENSOR_INFO = 8 + 4 + 4 + 8
_SMALLEST_ENTRY = 8 + 4 + 1


@dataclass(frozen=True)
class GGUFTensorInfo:
    """One tensor of the file.

    `shape` is in row-major order (the reverse of the file's), so its last dimension is the contiguous one.
    `offset` (from the start of the file) and `size` are in bytes. Rows are made of blocks of `block_size`
    values in `block_bytes` bytes.
    """

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    block_size: int
    block_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorInfo]


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file, and check that all tensor data lies inside the file.

    Raises `UserError` naming the file (and tensor): not a GGUF file, a version other than 2 or 3, big-endian,
    truncated or corrupt header, unknown tensor type, tensor data beyond the end of the file.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
            _check_head(path, head)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from error


def _check_head(path: Path, head: bytes) -> None:
    if head[:4] != _MAGIC:
        raise UserError(f"{path} is not a GGUF file: it starts with {head[:4]!r}, expected {_MAGIC!r}")
    version = int.from_bytes(head[4:8], "little")
    if version & 0xFFFF == 0 and len(head) == 8:
        raise UserError(f"{path} is a big-endian GGUF file; only little-endian files are supported")
    if version not in _VERSIONS:
        raise UserError(
            f"{path} is GGUF version {version}; versions {' and '.join(map(str, _VERSIONS))} are supported: "
            f"convert the model again with a current llama.cpp"
        )


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 4

    def parse(self) -> GGUFFile:
        version = self._scalar("I")
        tensor_count, entry_count = self._scalar("Q"), self._scalar("Q")
        self._expect_room(entry_count, _SMALLEST_ENTRY)
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"), key)
        self._expect_room(tensor_count, _SMALLEST_TENSOR_INFO)
        raw_infos = [self._raw_tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise UserError(f"{self._path}: general.alignment is {alignment!r}, expected a power of two")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for raw in raw_infos:
            info = self._tensor_info(data_start, *raw)
            if info.name in tensors:
                raise UserError(f"{self._path} lists tensor {info.name} twice")
            tensors[info.name] = info
        return GGUFFile(self._path, version, metadata, tensors)

    def _raw_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._scalar("I")
        if dims > _MAX_DIMS:
            raise UserError(
                f"{self._path}: tensor {name} has {dims} dimensions, expected at most {_MAX_DIMS}"
            )
        shape = self._unpack(f"{dims}Q")[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor_info(
        self, data_start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int
    ) -> GGUFTensorInfo:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            ggml_type = GGMLQuantizationType(type_id)
            block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
        except (ValueError, KeyError):
            raise UserError(
                f"{self._path}: tensor {name} has ggml type {type_id}, which the installed gguf package does "
                f"not know; try a newer one (`pip install -U gguf`) or a file with another quantization"
            ) from None
        row = shape[-1] if shape else 1
        if row % block_size:
            raise UserError(
                f"{self._path}: tensor {name} has rows of {row} values, expected a multiple of "
                f"{ggml_type.name}'s block of {block_size}"
            )
        size = math.prod(shape) // block_size * block_bytes
        start = data_start + offset
        if start + size > self._size:
            raise UserError(
                f"{self._path} is truncated: tensor {name} ends at byte {start + size}, the file has "
                f"{self._size}; download or copy it again"
            )
        return GGUFTensorInfo(name, type_id, ggml_type.name, shape, start, size, block_size, block_bytes)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(self._scalar_code(kind, key))

    def _array(self, key: str) -> list[Any]:
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            raise UserError(f"{self._path}: {key} is an array of arrays, which no model metadata uses")
        code = self._scalar_code(kind, key)
        self._expect_room(length, struct.calcsize(code))
        return list(self._unpack(f"{length}{code}"))

    def _strings(self, length: int) -> list[str]:
        self._expect_room(length, 8)
        data, at, read_length = self._data, self._at, struct.Struct("<Q").unpack_from
        values = []
        try:
            for _ in range(length):
                start = at + 8
                at = start + read_length(data, at)[0]
                values.append(data[start:at].decode("utf-8", "surrogateescape"))
        except (struct.error, OverflowError):
            raise self._truncated() from None
        if at > self._size:
            raise self._truncated()
        self._at = at
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _scalar_code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise UserError(f"{self._path}: {key} has metadata type {kind}, which GGUF does not define")
        return _SCALARS[kind]

    def _scalar(self, code: str) -> Any:
        return self._unpack(code)[0]

    def _unpack(self, code: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(f"<{code}", self._data, self._at)
        except struct.error:
            raise self._truncated() from None
        self._at += struct.calcsize(f"<{code}")
        return values

    def _expect_room(self, count: int, smallest: int) -> None:
        if count * smallest > self._size - self._at:
            raise self._truncated()

    def _truncated(self) -> UserError:
        return UserError(
            f"{self._path} is truncated or corrupt: its header does not end inside the file's {self._size} "
            f"bytes; download or copy it again"
        )
