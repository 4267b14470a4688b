"""Rotary frequencies of every scaling kind, computed in fp32 exactly as `transformers` computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """One model's rotary position embedding (RoFormer, Su et al. 2021) and its context extension.

    kind: `default`; `linear` (position interpolation, Chen et al. 2023); `dynamic` (NTK-aware, base
    enlarged by the sequence's own length); `llama3` (Llama 3.1); `yarn` (Peng et al. 2023);
    `longrope` (Ding et al. 2024; Phi-3).
    rotary_dim: leading dimensions of a head that are rotated, even.
    max_positions: the model's stated context length, tokens. original_max_positions: the length it had
    before extension (llama3, yarn, longrope).
    attention_factor: multiplies cos and sin; None derives it from the kind (yarn, longrope).
    short_factor, long_factor: divisors of each frequency up to and beyond original_max_positions (longrope).
    freq_factors: further divisors of each frequency, `rotary_dim / 2` of them (GGUF `rope_freqs.weight`).
    """

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    freq_factors: tuple[float, ...] | None = None

    @property
    def length_dependent(self) -> bool:
        """Whether the rotation of a token depends on how long its sequence is, not only on its position.

        Keys cached by a sequence of one length can then be wrong for a sequence of another.
        """
        return self.kind in ("dynamic", "longrope")


def attention_scale(rope: RopeConfig) -> float:
    """The number that multiplies cos and sin (and so, squared, the attention scores)."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        if rope.factor <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(_original(rope)))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """fp32 `[rotary_dim / 2]` on the CPU, radians per token, of a sequence no longer than the length at which
    a length-dependent kind begins to change."""
    frequencies = 1.0 / rope.theta ** exponents(rope)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope)
    elif rope.kind == "longrope":
        frequencies = _divided_by(rope, rope.short_factor)
    return _with_freq_factors(rope, frequencies)


def long_inverse_frequencies(rope: RopeConfig) -> Tensor:
    """As `inverse_frequencies`, of a longrope sequence that is longer than original_max_positions."""
    return _with_freq_factors(rope, _divided_by(rope, rope.long_factor))


def dynamic_inverse_frequencies(rope: RopeConfig, lengths: Tensor, exponent: Tensor) -> Tensor:
    """Frequencies of the dynamic kind for sequences of these lengths, without freq_factors.

    lengths: int64 `[tokens]`; exponent: `exponents(rope)`, on the same device. Returns fp32
    `[tokens, rotary_dim / 2]`. A length within max_positions gives the unscaled frequencies.
    """
    dim, limit = rope.rotary_dim, rope.max_positions
    growth = rope.factor * lengths.clamp(min=limit) / limit - (rope.factor - 1)
    # fp32 powers differ in the last bit with the shape of the batch; rounded from fp64 they do not, so a
    # token's angle never depends on its neighbours.
    base = (rope.theta * growth.double() ** (dim / (dim - 2))).float()
    return 1.0 / (base[:, None].double() ** exponent.double()).float()


def exponents(rope: RopeConfig) -> Tensor:
    """fp32 `[rotary_dim / 2]`: 0, 2/dim, 4/dim, ..."""
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rope.rotary_dim


def _original(rope: RopeConfig) -> int:
    if rope.original_max_positions is None:
        raise ValueError(f"RopeConfig of kind {rope.kind} needs original_max_positions")
    return rope.original_max_positions


def _with_freq_factors(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    if rope.freq_factors is None:
        return frequencies
    return frequencies / torch.tensor(rope.freq_factors, dtype=torch.float32)


def _divided_by(rope: RopeConfig, factors: tuple[float, ...] | None) -> Tensor:
    if factors is None:
        raise ValueError("RopeConfig of kind longrope needs short_factor and long_factor")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta ** exponents(rope))


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, _original(rope)
    if low is None or high is None:
        raise ValueError("RopeConfig of kind llama3 needs low_freq_factor and high_freq_factor")
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > original / low, frequencies / rope.factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, blended, scaled)


def _yarn_mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(rope: RopeConfig) -> Tensor:
    dim = rope.rotary_dim
    low = _yarn_dimension(rope, rope.beta_fast)
    high = _yarn_dimension(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as in the paper's code: no division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = rope.theta ** exponents(rope)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_dimension(rope: RopeConfig, rotations: float) -> float:
    """The dimension whose frequency makes this many rotations within the original length."""
    turns = _original(rope) / (rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))
