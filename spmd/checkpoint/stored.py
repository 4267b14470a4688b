"""Where the bytes of a tensor lie, and which of them a slice needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spmd.checkpoint.decode import decode
from spmd.checkpoint.gguf_blocks import COMPUTED_KINDS, to_computed
from spmd.checkpoint.slices import Bounds
from spmd.layers.quantized import BLOCK

Span = tuple[int, int]


@dataclass(frozen=True)
class Region:
    """A rectangle of a stored tensor: rows as the file has them, and bytes of each; both (start, stop)."""

    rows: Span
    columns: Span

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def __and__(self, other: Region) -> Region:
        """What two regions have in common; it may hold nothing."""
        return Region(_common(self.rows, other.rows), _common(self.columns, other.columns))

    def within(self, outer: Region) -> tuple[slice, slice]:
        """Where this region lies in the matrix of the bytes of `outer`, which holds it."""
        row, column = outer.rows[0], outer.columns[0]
        return (
            slice(self.rows[0] - row, self.rows[1] - row),
            slice(self.columns[0] - column, self.columns[1] - column),
        )


@dataclass(frozen=True)
class Part:
    """A region whose rows follow each other in `file`, from byte `offset` on."""

    file: str
    offset: int
    region: Region


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a matrix of stored bytes. A row is the last dimension; a vector is one row, but of a vector
    whose values are interleaved (`heads`, see gguf_source.py) each value is a row. `parts` cover the matrix,
    each byte once. `type_name` is GGUF's name of the type, which for floats is also that of safetensors;
    `block`: values in a block of it (1 for floats), and their bytes."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    block: tuple[int, int]
    parts: tuple[Part, ...]
    heads: int | None = None

    @property
    def matrix(self) -> Region:
        """All of the tensor."""
        rows = math.prod(self.shape[: self._row_dims])
        size, block_bytes = self.block
        return Region((0, rows), (0, math.prod(self.shape[self._row_dims :]) // size * block_bytes))

    def region(self, bounds: Bounds) -> Region:
        """The smallest rectangle of whole blocks that holds a slice."""
        if any(start == stop for start, stop in bounds):
            return Region((0, 0), (0, 0))
        size, block_bytes = self.block
        first, last = bounds[-1] if len(bounds) > self._row_dims else (0, 1)
        columns = (first // size * block_bytes, -(-last // size) * block_bytes)
        leading = bounds[: self._row_dims]
        if self.heads is None and len(leading) <= 1:
            return Region(leading[0] if leading else (0, 1), columns)
        rows = self.rows(bounds)
        return Region((int(rows.min()), int(rows.max()) + 1), columns)

    def rows(self, bounds: Bounds) -> np.ndarray:
        """Row numbers in the file of a slice's rows, in their order."""
        return _stored_rows(self.shape, bounds[: self._row_dims], self.heads)

    def block_kind(self, bounds: Bounds) -> str | None:
        """The kind of blocks that a slice can be computed on; None where there is none."""
        if len(bounds) != 2 or bounds[1][0] % BLOCK or bounds[1][1] % BLOCK:
            return None
        return COMPUTED_KINDS.get(self.type_name)

    def computed(self, raw: np.ndarray) -> Tensor:
        """Whole stored blocks, uint8 `[rows, bytes]`, as those of `block_kind`."""
        return to_computed(raw, self.type_name, self.decode)

    def decode(self, raw: np.ndarray) -> Tensor:
        """Values `[rows, values]` of contiguous whole blocks uint8 `[rows, bytes]`."""
        return decode(raw, self.type_name, self.block)

    @property
    def _row_dims(self) -> int:
        """How many leading dimensions count rows."""
        return 1 if self.heads is not None and len(self.shape) == 1 else max(0, len(self.shape) - 1)


def _stored_rows(shape: tuple[int, ...], leading: Bounds, heads: int | None) -> np.ndarray:
    """Row numbers in the file, in the order of the slice's rows; a row is the last dimension."""
    rows = np.zeros(1, dtype=np.int64)
    for dim, (start, stop) in enumerate(leading):
        along = np.arange(start, stop)
        if dim == 0 and heads is not None:
            along = _interleaved(along, shape[0] // heads)
        rows = (rows[:, None] * shape[dim] + along).reshape(-1)
    return rows


def _interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp's places for Hugging Face's rows.

    Row `head * head_dim + half * (head_dim / 2) + i` lies at `head * head_dim + 2 * i + half`; see
    `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    head, within = np.divmod(rows, head_dim)
    half, i = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * i + half


def _common(one: Span, two: Span) -> Span:
    start = max(one[0], two[0])
    return start, max(start, min(one[1], two[1]))
