"""RMSNorm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.layers.weights import Placement, Weights


class RMSNorm:
    """Normalizes the last dimension of `[..., size]` in fp32, as the reference models do."""

    def __init__(self, weights: Weights, placement: Placement, name: str, size: int, eps: float) -> None:
        self.weight = placement.load(weights, name + ".weight", (size,))
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)
