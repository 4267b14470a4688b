"""A slice of a tensor that is put together from stored bytes as they arrive."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spmd.checkpoint.decode import FLOAT_TYPES
from spmd.checkpoint.slices import Bounds, bounds_shape
from spmd.checkpoint.stored import Region, StoredTensor
from spmd.layers.quantized import BLOCK, BLOCK_BYTES, QuantizedTensor


class Sink(Protocol):
    """What takes the bytes of one region, rectangle by rectangle, in any order."""

    region: Region

    def memory(self, part: Region) -> Tensor | None:
        """Where the bytes of `part`, uint8 `[rows, bytes]`, can be written as they are; None where they have
        to be converted. `placed` follows."""
        ...

    def place(self, part: Region, raw: Tensor) -> None:
        """Convert the bytes of `part`, uint8 `[rows, bytes]`."""
        ...

    def placed(self, part: Region) -> None:
        """`part` has been written."""
        ...


class Assembly:
    """One slice of a tensor: as numbers of `dtype` (None: the stored type, float32 for blocks of few bits),
    or with `blocks` in blocks. Memory beyond the result is what one call of `place` converts."""

    def __init__(
        self, stored: StoredTensor, bounds: Bounds, dtype: torch.dtype | None, blocks: bool = False
    ) -> None:
        self.region = stored.region(bounds)
        self._stored = stored
        self._bounds = bounds
        self._kind = stored.block_kind(bounds) if blocks else None
        if blocks and self._kind is None:
            raise ValueError(f"{stored.name}: the slice {bounds} is not stored in whole blocks")
        plain = FLOAT_TYPES.get(stored.type_name, torch.float32)
        self._dtype = torch.uint8 if blocks else dtype or plain
        self._as_stored = self._kind == stored.type_name or (
            self._dtype == plain and stored.type_name in FLOAT_TYPES
        )
        self._left = self.region.nbytes
        self._out: Tensor | None = None
        self._where: np.ndarray | None = None
        rows, first = self.region.rows, self.region.rows[0]
        self._in_order = stored.heads is None and len(bounds) <= 2
        if not self._in_order and self._left:
            wanted = stored.rows(bounds) - first
            self._in_order = bool((np.diff(wanted) == 1).all())
            if not self._in_order:
                self._where = np.full(rows[1] - first, -1)
                self._where[wanted] = np.arange(len(wanted))

    @property
    def complete(self) -> bool:
        return self._left == 0

    def memory(self, part: Region) -> Tensor | None:
        """See `Sink`."""
        if not (self._as_stored and self._in_order and part.columns == self.region.columns):
            return None
        return self._matrix().view(torch.uint8)[part.within(self.region)[0]]

    def place(self, part: Region, raw: Tensor) -> None:
        """See `Sink`."""
        rows, columns = part.within(self.region)
        target = self._matrix()
        size, block_bytes = self._stored.block
        # Whole blocks arrive; the slice may begin inside the first one.
        low = columns.start // block_bytes * size - self._cut()
        if self._kind is not None:
            values = self._stored.computed(raw.numpy())
            low = low // BLOCK * BLOCK_BYTES[self._kind]
        else:
            values = self._stored.decode(raw.numpy())
        cut = slice(max(0, -low), max(0, min(values.shape[1], target.shape[1] - low)))
        values = values[:, cut]
        into = slice(low + cut.start, low + cut.start + values.shape[1])
        if self._where is None:
            target[rows, into].copy_(values)
        else:
            where = torch.from_numpy(self._where[rows])
            target[where[where >= 0], into] = values[where >= 0].to(target.dtype)
        self.placed(part)

    def placed(self, part: Region) -> None:
        """See `Sink`."""
        self._left -= part.nbytes

    def tensor(self) -> Tensor:
        """The numbers, in the slice's shape. Raises `RuntimeError` while bytes are missing."""
        return self._complete().view(bounds_shape(self._bounds))

    def quantized(self) -> QuantizedTensor:
        """The blocks. Raises as `tensor` does."""
        assert self._kind is not None
        return QuantizedTensor(self._kind, self._complete())

    def _complete(self) -> Tensor:
        if not self.complete:
            raise RuntimeError(f"{self._stored.name}: {self._left} bytes of {self.region} have not arrived")
        return self._matrix()

    def _cut(self) -> int:
        """Values between the start of the region and of the slice."""
        size, block_bytes = self._stored.block
        by_row = self._stored.heads is not None and len(self._bounds) == 1
        first = self._bounds[-1][0] if self._bounds and not by_row else 0
        return first - self.region.columns[0] // block_bytes * size

    def _matrix(self) -> Tensor:
        """The result as `[rows, columns]`."""
        if self._out is None:
            shape = bounds_shape(self._bounds)
            if self._kind is not None:
                shape = (shape[0], shape[1] // BLOCK * BLOCK_BYTES[self._kind])
            if len(shape) == 1 and self._stored.heads is not None:
                shape = (shape[0], 1)
            rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
            self._out = torch.empty((rows, columns), dtype=self._dtype)
        return self._out
