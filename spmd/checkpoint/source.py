"""What a checkpoint offers to the loader, whatever its file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from spmd.checkpoint.assembly import Assembly
from spmd.checkpoint.file_reader import FileReader
from spmd.checkpoint.slices import Index, slice_bounds
from spmd.checkpoint.stored import Region, StoredTensor
from spmd.layers.quantized import QuantizedTensor

if TYPE_CHECKING:
    from typing_extensions import Self

PIECE_BYTES = 4 << 20  # of one read, where rows are not longer; more would not stay in the cache


class TensorSource(ABC):
    """Named tensors in Hugging Face names, shapes and layouts, read a slice at a time.

    `location` is the folder or file, for messages.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._files = FileReader()

    @property
    def bytes_read(self) -> int:
        """Stored bytes that were fetched, which is less than the results' size when the file is quantized."""
        return self._files.bytes_read

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor. Raises `KeyError` for an unknown name, like the methods below."""

    @abstractmethod
    def dtype_name(self, name: str) -> str:
        """The stored type in its format's own words: `BF16`, `F8_E4M3`, `Q4_K`, ..."""

    @abstractmethod
    def file_of(self, name: str) -> str:
        """Path of the file that holds the tensor."""

    @abstractmethod
    def stored(self, name: str) -> StoredTensor:
        """Where the tensor's bytes lie. Raises `UserError` for a stored type that can't be read."""

    def read(self, name: str, index: Index | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A fresh contiguous CPU tensor holding `tensor[index]`, reading only the rows that the slice needs.

        `index` has step-1 slices for the leading dimensions; dimensions it does not mention are whole.
        `dtype` None keeps the stored type (float32 for a quantized one). Memory beyond the result is bounded.
        Raises `UserError` for a stored type that can't be read and for a file that can't be, `IndexError` for
        a slice outside the shape.
        """
        return self._read(self.stored(name), index, dtype)

    def read_blocks(self, name: str, index: Index | None = None) -> QuantizedTensor | None:
        """`tensor[index]` as it is stored in blocks; None where it is not, or the slice cuts them. Raises as
        `read` does."""
        stored = self.stored(name)
        bounds = slice_bounds(stored.shape, index)
        if stored.block_kind(bounds) is None:
            return None
        assembly = Assembly(stored, bounds, None, blocks=True)
        self._fill(assembly, stored)
        return assembly.quantized()

    def close(self) -> None:
        """Close files. Tensors already read stay valid."""
        self._files.close()

    def __getstate__(self) -> dict[str, Any]:
        """For other ranks: without open files."""
        return {**self.__dict__, "_files": FileReader()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, stored: StoredTensor, index: Index | None, dtype: torch.dtype | None) -> torch.Tensor:
        assembly = Assembly(stored, slice_bounds(stored.shape, index), dtype)
        self._fill(assembly, stored)
        return assembly.tensor()

    def _fill(self, assembly: Assembly, stored: StoredTensor) -> None:
        scratch = torch.empty(0, dtype=torch.uint8)
        for part in stored.parts:
            wanted = part.region & assembly.region
            if not wanted.nbytes:
                continue
            columns = part.region.columns
            row_bytes = columns[1] - columns[0]
            step = max(1, PIECE_BYTES // row_bytes)
            for first in range(*wanted.rows, step):
                rows = Region((first, min(wanted.rows[1], first + step)), columns)
                inside = rows & assembly.region
                offset = part.offset + (first - part.region.rows[0]) * row_bytes
                memory = assembly.memory(inside) if inside == rows else None
                if memory is not None:
                    self._files.read(stored.name, part.file, offset, memory)
                    assembly.placed(inside)
                    continue
                if len(scratch) < rows.nbytes:
                    scratch = torch.empty(rows.nbytes, dtype=torch.uint8)
                raw = scratch[: rows.nbytes].view(rows.shape)
                self._files.read(stored.name, part.file, offset, raw)
                assembly.place(inside, raw[inside.within(rows)].contiguous())
