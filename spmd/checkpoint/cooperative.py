"""Weights for a rank of many: each byte is read from storage once a job, by one of the ranks that need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmd.checkpoint.assembly import Assembly
from spmd.checkpoint.exchange import Exchange
from spmd.checkpoint.load_plan import plan_load
from spmd.checkpoint.slices import Bounds, Index, bounds_shape, slice_bounds
from spmd.checkpoint.source import TensorSource
from spmd.checkpoint.stored import Region, StoredTensor
from spmd.checkpoint.weights import WeightReader
from spmd.comm.errors import UserError
from spmd.comm.grid import Grid
from spmd.layers.quantized import BLOCK, BLOCK_BYTES, QuantizedTensor

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Request:
    """A slice that a model asks for; `blocks`: as it is stored."""

    name: str
    bounds: Bounds
    dtype: torch.dtype | None = None
    blocks: bool = False


class RequestRecorder(WeightReader):
    """Stands in for weights while a model is built on the meta device: writes down what it asks for."""

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source)
        self.requests: list[Request] = []

    def get(
        self, name: str, shape: tuple[int, ...], index: Index | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Weights.get`; on the meta device. Raises `UserError` as `WeightReader` does, and for a stored
        type that can't be read."""
        self._check(name, shape)
        self._source.stored(name)
        request = Request(name, slice_bounds(shape, index), dtype)
        self.requests.append(request)
        return torch.empty(bounds_shape(request.bounds), dtype=dtype, device="meta")

    def get_blocks(
        self, name: str, shape: tuple[int, ...], index: Index | None = None
    ) -> QuantizedTensor | None:
        """See `Weights.get_blocks`. Raises as `get` does."""
        self._check(name, shape)
        request = Request(name, slice_bounds(shape, index), blocks=True)
        kind = self._source.stored(name).block_kind(request.bounds)
        if kind is None:
            return None
        self.requests.append(request)
        rows, columns = bounds_shape(request.bounds)
        row_bytes = columns // BLOCK * BLOCK_BYTES[kind]
        return QuantizedTensor(kind, torch.empty(rows, row_bytes, dtype=torch.uint8, device="meta"))


class CooperativeWeights:
    """Gives this rank the slices it has said it will ask for, in that order; reads and sends on as it goes.

    Every rank of the grid makes one and, in a `with` block, calls `get` and `get_blocks` as recorded. What
    arrives before its turn is kept. A `UserError` of one rank in the block is raised on every rank: by what
    they call in it, at its end, or (by a rank that needs nothing of others any more) after it, so the block
    itself is inside an `agreed`.
    """

    def __init__(
        self,
        source: TensorSource,
        grid: Grid,
        requests: Sequence[Request],
        on_read: Callable[[int], object] | None = None,
    ) -> None:
        self._requests = list(requests)
        self._given = 0
        stored, wanted = gather_wanted(source, grid, requests)
        self._slices = {
            number: Assembly(stored[request.name], request.bounds, request.dtype, request.blocks)
            for number, request in enumerate(requests)
        }
        self.plan = plan_load(stored, wanted, grid.dp_size)
        self.exchange = Exchange(grid.world, self.plan, self._slices, on_read)

    def get(
        self, name: str, shape: tuple[int, ...], index: Index | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Weights.get`. Raises `ValueError` for anything but the next slice that was recorded."""
        return self._next(Request(name, slice_bounds(shape, index), dtype)).tensor()

    def get_blocks(
        self, name: str, shape: tuple[int, ...], index: Index | None = None
    ) -> QuantizedTensor | None:
        """See `Weights.get_blocks`. Raises as `get` does."""
        request = Request(name, slice_bounds(shape, index), blocks=True)
        if self._given == len(self._requests) or self._requests[self._given] != request:
            return None
        return self._next(request).quantized()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exchange = self.exchange
        if error is None:
            while not exchange.done:  # this rank only reads for others in the rounds that are left
                exchange.step()
        elif isinstance(error, UserError) and not exchange.failed and not exchange.done:
            exchange.step(error)

    def _next(self, request: Request) -> Assembly:
        number = self._given
        if number == len(self._requests) or self._requests[number] != request:
            raise ValueError(f"slice {number} asked for is {request}, which is not what was recorded")
        piece = self._slices[number]
        while not piece.complete and not self.exchange.done:
            self.exchange.step()
        self._given += 1
        del self._slices[number]
        return piece


def wanted_regions(source: TensorSource, requests: Sequence[Request]) -> list[tuple[str, Region]]:
    """The stored bytes behind each request."""
    return [(request.name, source.stored(request.name).region(request.bounds)) for request in requests]


def gather_wanted(
    source: TensorSource, grid: Grid, requests: Sequence[Request]
) -> tuple[dict[str, StoredTensor], list[list[tuple[str, Region]]]]:
    """What every place of a replica wants, and where the bytes of those tensors lie. Collective."""
    wanted = grid.replica.all_gather_objects(wanted_regions(source, requests))
    names = {name for regions in wanted for name, _ in regions}
    return {name: source.stored(name) for name in names}, wanted
