"""Element-wise reductions in rank order: the one place where the ranks' numbers are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SUMMABLE = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


def check_summable(dtype: torch.dtype) -> None:
    if dtype not in _SUMMABLE:
        raise TypeError(f"cannot reduce tensors of {dtype}, expected a float of 16 to 64 bits or an integer")


def sum_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """`out = parts[0] + parts[1] + ...` in that order; 16-bit floats are summed in fp32 and rounded once.

    `out` must not overlap `parts`, and may be of a wider type: fp32 keeps sums of 16-bit floats unrounded.
    The order makes the result the same on every rank and in every run.
    """
    if len(parts) == 2 and parts[0].dtype is out.dtype:
        torch.add(parts[0], parts[1], out=out)  # torch adds 16-bit floats in fp32 and rounds once
    elif out.dtype is torch.bfloat16 or out.dtype is torch.float16:
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
    else:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)


def max_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Element-wise maximum; a NaN on any rank is kept."""
    out.copy_(parts[0])
    for part in parts[1:]:
        torch.maximum(out, part, out=out)
