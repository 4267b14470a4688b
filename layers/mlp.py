"""Gated MLP (SwiGLU and its kin; Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from spmd.comm.partition import Partition
from spmd.layers.linear import ColumnParallelLinear, RowParallelLinear
from spmd.layers.weights import Placement, Weights, pack

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class GatedMLP:
    """`down(act(gate(x)) * up(x))`, the intermediate features split over the TP group, evenly or not."""

    def __init__(
        self,
        weights: Weights,
        placement: Placement,
        gate_up_names: Sequence[str],
        down_name: str,
        hidden_size: int,
        intermediate: Partition,
        activation: str,
        bias: bool,
    ) -> None:
        mine = intermediate.slice(placement.tp.rank)
        pieces = pack(gate_up_names, [intermediate.total] * 2, [mine, mine])
        self.gate_up = ColumnParallelLinear(weights, placement, pieces, hidden_size, bias)
        self.down = RowParallelLinear(weights, placement, down_name, intermediate, hidden_size, bias)
        self.activation_name = activation
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)
