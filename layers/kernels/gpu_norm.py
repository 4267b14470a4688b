"""RMSNorm, alone or fused with the residual sum before it, one row a program (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out = RMSNorm(x), or with ADD residual += x and out = RMSNorm(residual)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        kept = residual + row * residual_stride + column
        total = values + tl.load(kept, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(residual.dtype.element_ty)
        tl.store(kept, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / size + eps)
    # Rounded before the weight is applied, as the reference models do.
    normed = (values * scale).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm of x `[rows, size]`, whose rows may lie apart; see the twin."""
    return _launch(x, None, weight, eps, out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual `[rows, size]` += x, then its RMSNorm in x's dtype; `out` may be x."""
    return _launch(x, residual, weight, eps, out)


def num_warps(block: int) -> int:
    """Warps that leave a thread about 16 numbers of a row."""
    return min(16, max(1, block // 512))


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    rows, size = x.shape
    if out is None:
        out = x.new_empty(rows, size)
    if rows:
        block = triton.next_power_of_2(size)
        kept = x if residual is None else residual
        norm_kernel[(rows,)](
            x,
            kept,
            weight,
            out,
            size,
            x.stride(0),
            kept.stride(0),
            out.stride(0),
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return out
