"""Matrices of 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa) with one scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0  # of torch.float8_e4m3fn, which has no infinity


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix `[out, in]`: `weight` float8_e4m3fn `[out, in]` times `scale` fp32 `[out]`."""

    weight: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def dequantize(self) -> Tensor:
        """fp32 `[out, in]`."""
        return self.weight.float() * self.scale[:, None]

    @staticmethod
    def quantize(matrix: Tensor) -> Fp8Weight:
        """Each row scaled so that its largest number becomes the format's largest."""
        wide = matrix.float()
        scale = wide.abs().amax(-1) / LARGEST
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        scaled = (wide / scale[:, None]).clamp(-LARGEST, LARGEST)
        return Fp8Weight(scaled.to(torch.float8_e4m3fn), scale)
