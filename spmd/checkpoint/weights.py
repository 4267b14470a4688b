"""What a model asks of a checkpoint (see `layers.weights.Weights`): tensors by name, with their shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spmd.checkpoint.slices import Index, bounds_shape, slice_bounds
from spmd.checkpoint.source import TensorSource
from spmd.comm.errors import UserError
from spmd.layers.quantized import QuantizedTensor

_MOST_NAMED = 5


class WeightReader:
    """Reads from a checkpoint and checks shapes."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._names = frozenset(source.names())

    def get(
        self, name: str, shape: tuple[int, ...], index: Index | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See `Weights.get`. Raises `UserError` for a missing tensor and for another shape than expected."""
        self._check(name, shape)
        return self._source.read(name, index, dtype)

    def get_blocks(
        self, name: str, shape: tuple[int, ...], index: Index | None = None
    ) -> QuantizedTensor | None:
        """See `Weights.get_blocks`. Raises as `get` does."""
        self._check(name, shape)
        return self._source.read_blocks(name, index)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._names:
            raise UserError(f"{_missing(name, shape)} is not in {self._source.location}")
        if self._source.shape(name) != tuple(shape):
            raise UserError(_wrong_shape(name, shape, self._source))


class ExpectedWeights:
    """Stands in for a checkpoint in a dry run: gives meta tensors, records names and full shapes."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def get(
        self, name: str, shape: tuple[int, ...], index: Index | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See `Weights.get`; the result is on the meta device. Raises `ValueError` when one tensor is asked
        for with two shapes."""
        shape = tuple(shape)
        if self.shapes.setdefault(name, shape) != shape:
            raise ValueError(f"tensor {name} is expected both as {list(self.shapes[name])} and {list(shape)}")
        return torch.empty(bounds_shape(slice_bounds(shape, index)), dtype=dtype, device="meta")

    def get_blocks(
        self, name: str, shape: tuple[int, ...], index: Index | None = None
    ) -> QuantizedTensor | None:
        """None: a dry run has no blocks."""
        return None


def check_complete(expected: Mapping[str, tuple[int, ...]], source: TensorSource) -> list[str]:
    """Compare the tensors a model needs (full shapes) with those of a checkpoint, before any is read.

    Returns warnings: at most one, about tensors of the checkpoint that the model does not use. Raises one
    `UserError` about all tensors that are missing or have another shape, naming the first five; or else one
    about the first whose stored type can't be read.
    """
    stored = set(source.names())
    faults = []
    for name, shape in expected.items():
        if name not in stored:
            faults.append(f"{_missing(name, shape)} is missing")
        elif source.shape(name) != tuple(shape):
            faults.append(_wrong_shape(name, shape, source))
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults[:_MOST_NAMED])
        more = f"\n  and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        raise UserError(
            f"{source.location} does not hold the model its configuration describes; "
            f"{len(faults)} of {len(expected)} tensors do not fit:{listed}{more}"
        )
    for name in expected:
        source.stored(name)
    extra = sorted(stored - set(expected))
    if not extra:
        return []
    named = ", ".join(extra[:_MOST_NAMED])
    more = f" and {len(extra) - _MOST_NAMED} more" if len(extra) > _MOST_NAMED else ""
    return [f"{source.location} holds {len(extra)} tensors that the model does not use: {named}{more}"]


def _missing(name: str, shape: tuple[int, ...]) -> str:
    return f"tensor {name} (expected shape {list(shape)})"


def _wrong_shape(name: str, shape: tuple[int, ...], source: TensorSource) -> str:
    return (
        f"tensor {name} in {source.file_of(name)} has shape {list(source.shape(name))}, "
        f"expected {list(shape)} from the model's configuration"
    )
