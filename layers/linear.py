"""Column- and row-parallel linear layers (names and roles as in Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spmd.comm.partition import Partition
from spmd.layers.kernels.matmul import linear
from spmd.layers.quantized import Weight, cat_rows, stack_rows
from spmd.layers.weights import Piece, Placement, Weights


class ColumnParallelLinear:
    """Splits the output features over the TP group: x `[tokens, in]` -> `[tokens, local_out]`.

    Several checkpoint tensors can be packed into one matrix (`pieces`). No communication.
    """

    def __init__(
        self, weights: Weights, placement: Placement, pieces: Sequence[Piece], in_features: int, bias: bool
    ) -> None:
        parts: list[Weight] = []
        biases = []
        for piece in pieces:
            shape = (piece.full_rows, in_features)
            index = (piece.rows, slice(0, in_features))
            parts.append(placement.load_matrix(weights, piece.name + ".weight", shape, index))
            if bias:
                biases.append(
                    placement.load(weights, piece.name + ".bias", (piece.full_rows,), (piece.rows,))
                )
        self.weight = stack_rows(parts, placement.dtype)
        self.bias = cat_rows(biases) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowParallelLinear:
    """Splits the input features over the TP group: x `[tokens, local_in]` -> `[tokens, out]` on every rank.

    The partial products are summed over the group; the bias is added once, after the sum.
    """

    def __init__(
        self,
        weights: Weights,
        placement: Placement,
        name: str,
        in_partition: Partition,
        out_features: int,
        bias: bool,
    ) -> None:
        self.tp = placement.tp
        shape = (out_features, in_partition.total)
        columns = in_partition.slice(self.tp.rank)
        self.weight = placement.load_matrix(
            weights, name + ".weight", shape, (slice(0, out_features), columns)
        )
        self.bias = placement.load(weights, name + ".bias", (out_features,)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        out = self.tp.all_reduce(linear(x, self.weight))
        return out if self.bias is None else out + self.bias
