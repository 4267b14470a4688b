"""Rotary position embedding of packed tokens, each with its own position and sequence length."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.layers.rope_scaling import (
    RopeConfig,
    attention_scale,
    dynamic_inverse_frequencies,
    exponents,
    inverse_frequencies,
    long_inverse_frequencies,
)


class Rotary:
    """cos and sin tables of one model.

    switch_length: for longrope the original length: a sequence that grows beyond it changes tables, so the
    keys it has cached must be computed again with its new length. None for every other kind.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        """Raises `ValueError` when the rotary dimension is odd or does not fit into a head."""
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim {rope.rotary_dim} of heads of {head_dim}: expected even, 2 to head_dim"
            )
        self.rope = rope
        self.attention_scale = attention_scale(rope)
        self.switch_length = rope.original_max_positions if rope.kind == "longrope" else None
        self._inv_freq = inverse_frequencies(rope).to(device)
        if rope.kind == "longrope":
            self._long_inv_freq = long_inverse_frequencies(rope).to(device)
        elif rope.kind == "dynamic":
            self._exponents = exponents(rope).to(device)
            factors = rope.freq_factors or (1.0,) * (rope.rotary_dim // 2)
            self._freq_factors = torch.tensor(factors, dtype=torch.float32, device=device)

    def inv_freq(self, lengths: Tensor) -> Tensor:
        """Frequencies of tokens whose sequences have these lengths (int64 `[tokens]`): fp32,
        `[tokens, rotary_dim / 2]`, or `[1, rotary_dim / 2]` for a kind that lengths do not matter to."""
        table = self._inv_freq[None, :]
        if self.switch_length is not None:
            return torch.where((lengths > self.switch_length)[:, None], self._long_inv_freq, table)
        if self.rope.kind == "dynamic":
            enlarged = dynamic_inverse_frequencies(self.rope, lengths, self._exponents) / self._freq_factors
            return torch.where((lengths > self.rope.max_positions)[:, None], enlarged, table)
        return table

    def cos_sin(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each fp32 `[tokens, rotary_dim / 2]`, times the attention factor.

        positions: int64 `[tokens]`. lengths: int64 `[tokens]`, the length of the sequence each token belongs
        to (the whole prompt while it is prefilled, whatever the chunk); read by `dynamic` and `longrope`.
        A token's row depends on its own two numbers only, never on its neighbours in the batch.
        """
        angles = positions.to(torch.float32)[:, None] * self.inv_freq(lengths)
        return angles.cos() * self.attention_scale, angles.sin() * self.attention_scale


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` of each head (NeoX/HF layout: dimension i pairs with i + rotary_dim / 2).

    x: `[tokens, heads, head_dim]`; cos, sin: `[tokens, rotary_dim / 2]`, rounded to x's dtype before use as
    HF does. Returns a new tensor like x; dimensions beyond rotary_dim pass through.
    """
    half = cos.shape[-1]
    cos = cos.to(x.dtype)[:, None, :]
    sin = sin.to(x.dtype)[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
