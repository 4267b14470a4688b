"""What a checkpoint offers to the loader, whatever its file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from spmd.layers.quantized import QuantizedTensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from spmd.checkpoint.stored import StoredTensor

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]


class TensorSource(ABC):
    """Named tensors in Hugging Face names, shapes and layouts, read a slice at a time.

    `location` is the folder or file, for messages. `bytes_read` counts the stored bytes that were
    fetched, which is less than the result's size when the file is quantized.
    """

    location: str
    bytes_read: int = 0

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
    def read(self, name: str, index: Index | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A fresh contiguous CPU tensor holding `tensor[index]`, reading only what the slice needs.

        `index` has step-1 slices for the leading dimensions; dimensions it does not mention are whole.
        `dtype` None keeps the stored type (float32 for a quantized one). Memory beyond the result is bounded.
        Raises `UserError` for a stored type that can't be read, `IndexError` for a slice outside the shape.
        """

    @abstractmethod
    def stored(self, name: str) -> StoredTensor:
        """Where the tensor's bytes lie. Raises `UserError` for a stored type that can't be read."""

    def read_blocks(self, name: str, index: Index | None = None) -> QuantizedTensor | None:
        """`tensor[index]` as it is stored in blocks; None where it is not, or the slice cuts them."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release files and mappings. Tensors already read stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def slice_bounds(shape: tuple[int, ...], index: Index | None) -> Bounds:
    """(start, stop) for every dimension of `shape`.

    Unlike Python's own slicing nothing is clamped: a slice that leaves the shape is a program fault.
    """
    index = index or ()
    if len(index) > len(shape):
        raise IndexError(f"{len(index)} slices for a tensor of shape {list(shape)}")
    bounds = []
    for dim, size in enumerate(shape):
        part = index[dim] if dim < len(index) else slice(None)
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise IndexError(f"slice {part} of dimension {dim} does not fit the shape {list(shape)}")
        bounds.append((start, stop))
    return tuple(bounds)


def bounds_shape(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)
