"""Random numbers as a function of (seed, position, token id), the same on every rank and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.layers.noise import gumbel, squares64, uniform

__all__ = ["gumbel", "squares64", "stream_keys", "uniform"]

_MASK64 = (1 << 64) - 1


def stream_keys(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Keys `[rows]` (int64, odd) of the noise streams of `(seed, position)` pairs.

    Both numbers go through the SplitMix64 finalizer (Steele, Lea, Flood 2014), so that neighbouring seeds
    and positions give unrelated keys with the irregular digits that `squares64` asks for. Seeds count
    modulo 2**64.
    """
    keys = (_mix(_mix(seed) + position) | 1 for seed, position in zip(seeds, positions))
    return torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys], dtype=torch.int64)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
