"""Head norms, rotary embedding and the write to the KV cache in one pass over q, k and v (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 4  # of one program


@triton.jit
def load_head(
    base: tl.tensor,
    norm: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    scale: tl.tensor,
    NORM: tl.constexpr,
) -> tl.tensor:
    """fp32 numbers at `place` of heads; with NORM times scale `[heads, 1]` and the norm's weights."""
    raw = tl.load(base, mask=inside, other=0.0)
    if NORM:
        spread = place[None, :] + tl.zeros(inside.shape, tl.int32)
        weight = tl.load(norm + spread, mask=inside, other=0.0).to(tl.float32)
        normed = (raw.to(tl.float32) * scale).to(raw.dtype).to(tl.float32)
        return (normed * weight).to(raw.dtype).to(tl.float32)
    return raw.to(tl.float32)


@triton.jit
def turn(
    source: tl.tensor,
    head_stride: tl.tensor,
    target: tl.tensor,
    target_stride: tl.tensor,
    first_head: tl.tensor,
    num_heads: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    """Norm and rotation of one token's heads from `source` to `target`, which may be the same."""
    head = first_head + tl.arange(0, HEADS)
    real = (head < num_heads)[:, None]
    start = source + head[:, None] * head_stride
    place = tl.arange(0, HALF_PAD)
    half = real & (place < HALF)[None, :]
    everywhere = tl.arange(0, DIM_PAD)
    scale = tl.full([HEADS, 1], 1.0, tl.float32)
    if NORM:
        whole = real & (everywhere < DIM)[None, :]
        values = tl.load(start + everywhere[None, :], mask=whole, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=1)[:, None] / DIM + eps)
    first = load_head(start + place[None, :], norm, place, half, scale, NORM)
    second = load_head(start + HALF + place[None, :], norm + HALF, place, half, scale, NORM)
    # The tables count in the precision of the heads, as in the reference models.
    kept = source.dtype.element_ty
    c = tl.load(cos + place, mask=place < HALF, other=0.0).to(kept).to(tl.float32)[None, :]
    s = tl.load(sin + place, mask=place < HALF, other=0.0).to(kept).to(tl.float32)[None, :]
    result = target + head[:, None] * target_stride
    turned = (first * c - second * s).to(kept).to(target.dtype.element_ty)
    tl.store(result + place[None, :], turned, mask=half)
    turned = (second * c + first * s).to(kept).to(target.dtype.element_ty)
    tl.store(result + HALF + place[None, :], turned, mask=half)
    if 2 * HALF < DIM:
        rest = real & (everywhere >= 2 * HALF)[None, :] & (everywhere < DIM)[None, :]
        passed = load_head(start + everywhere[None, :], norm, everywhere, rest, scale, NORM)
        tl.store(result + everywhere[None, :], passed.to(kept).to(target.dtype.element_ty), mask=rest)


@triton.jit
def rotary_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_cache_stride: tl.tensor,
    k_cache_head_stride: tl.tensor,
    v_cache_stride: tl.tensor,
    v_cache_head_stride: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    """Program (token, part): the first parts have query heads, the others KV heads."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += token * HALF
    sin += token * HALF
    q_parts = tl.cdiv(num_heads, HEADS)
    if part < q_parts:
        row = q + token * q_stride
        turn(
            row, q_head_stride, row, q_head_stride, part * HEADS, num_heads, q_norm, cos, sin, eps,
            DIM, HALF, Q_NORM, HEADS, HALF_PAD, DIM_PAD,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            first_head = (part - q_parts) * HEADS
            turn(
                k + token * k_stride, k_head_stride, k_cache + slot * k_cache_stride, k_cache_head_stride,
                first_head, num_kv_heads, k_norm, cos, sin, eps,
                DIM, HALF, K_NORM, HEADS, HALF_PAD, DIM_PAD,
            )  # fmt: skip
            head = first_head + tl.arange(0, HEADS)[:, None]
            place = tl.arange(0, DIM_PAD)[None, :]
            inside = (head < num_kv_heads) & (place < DIM)
            values = tl.load(v + token * v_stride + head * v_head_stride + place, mask=inside, other=0.0)
            target = v_cache + slot * v_cache_stride + head * v_cache_head_stride + place
            tl.store(target, values.to(v_cache.dtype.element_ty), mask=inside)


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """See the twin. q, k and v may be views of one matrix; the numbers of a head must lie side by side."""
    tokens, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    parts = triton.cdiv(num_heads, _HEADS) + triton.cdiv(num_kv_heads, _HEADS)
    if not tokens or not parts:
        return
    half = cos.shape[1]
    rotary_kernel[(tokens, parts)](
        q,
        k,
        v,
        cos.contiguous(),
        sin.contiguous(),
        slot_mapping,
        k_cache,
        v_cache,
        q if q_norm is None else q_norm,
        k if k_norm is None else k_norm,
        num_heads,
        num_kv_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        eps,
        DIM=dim,
        HALF=half,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        HEADS=_HEADS,
        HALF_PAD=triton.next_power_of_2(half),
        DIM_PAD=triton.next_power_of_2(dim),
        num_warps=2,
    )
