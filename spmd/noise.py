"""Random numbers as a function of (seed, position, token id), the same on every rank and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_LOW32 = 0xFFFFFFFF


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


def squares64(counters: Tensor, keys: Tensor) -> Tensor:
    """64 random bits (int64) for each counter and key, broadcast against each other.

    Squares, five rounds (Widynski, arXiv:2004.06278). Two's complement wraps like the paper's unsigned
    arithmetic; only the right shifts need a mask.
    """
    y = counters * keys
    z = y + keys
    x = _swap_halves((y * y).add_(y))
    x = _swap_halves(x.mul_(x).add_(z))
    x = _swap_halves(x.mul_(x).add_(y))
    t = x.mul_(x).add_(z)
    x = _swap_halves(t.clone())
    return t.bitwise_xor_(x.mul_(x).add_(y).bitwise_right_shift_(32).bitwise_and_(_LOW32))


def uniform(counters: Tensor, keys: Tensor) -> Tensor:
    """Uniform numbers (float64) inside (0, 1): the upper 52 bits of `squares64`, centred in their cell.

    They and their distance from 1 are exact, so both tails keep their precision.
    """
    bits = squares64(counters, keys).bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return bits.double().add_(0.5).mul_(2.0**-52)


def gumbel(counters: Tensor, keys: Tensor) -> Tensor:
    """Standard Gumbel noise (float64), between -3.6 and 36.8."""
    return uniform(counters, keys).log_().neg_().log_().neg_()


def _swap_halves(x: Tensor) -> Tensor:
    high = x.bitwise_right_shift(32).bitwise_and_(_LOW32)
    return x.bitwise_left_shift_(32).bitwise_or_(high)
