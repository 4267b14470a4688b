"""Random numbers as a function of a counter and a key, the same on every rank and device."""

from __future__ import annotations

from torch import Tensor

_LOW32 = 0xFFFFFFFF


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
