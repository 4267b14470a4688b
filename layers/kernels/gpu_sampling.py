"""A rank's candidate for each row's next token, on the device: the largest logit or a Gumbel draw (Triton).

The noise is that of `spmd.noise`, bit for bit up to the logarithm: Squares (Widynski, arXiv:2004.06278) in
64-bit integers, then fp64. A logarithm may differ in its last digit from the host's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # logits at a time
_MOST_PARTS = 64


@triton.jit
def swap_halves(x: tl.tensor) -> tl.tensor:
    return (x >> 32) | (x << 32)


@triton.jit
def squares64(counter: tl.tensor, key: tl.tensor) -> tl.tensor:
    """64 random bits for each counter and key, all uint64."""
    y = counter * key
    z = y + key
    x = swap_halves(y * y + y)
    x = swap_halves(x * x + z)
    x = swap_halves(x * x + y)
    t = x * x + z
    x = swap_halves(t)
    return t ^ ((x * x + y) >> 32)


@triton.jit
def gumbel(counter: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise, fp64: the upper 52 bits as a number inside (0, 1), twice its logarithm."""
    # Below 2**53 a signed integer holds them too, whose conversion every target has.
    bits = (squares64(counter, key) >> 12).to(tl.int64)
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def largest_kernel(
    logits: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    share: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row, part): largest logit of `share` columns, NaN if there is one, and the first such column.

    values fp64 and places int64 `[rows, PARTS]`.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * share
    last = tl.minimum(first + share, columns)
    best = tl.full([], float("-inf"), tl.float32)
    place = first
    broken = tl.full([], 0, tl.int32)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < last, other=float("-inf")).to(tl.float32)
        broken = tl.maximum(broken, tl.max((x != x).to(tl.int32), axis=0))
        x = tl.where(x != x, float("-inf"), x)
        top = tl.max(x, axis=0)
        found = tl.min(tl.where((x == top) & (column < last), column, 2147483647), axis=0)
        place = tl.where(top > best, found, place)
        best = tl.maximum(best, top)
    best = tl.where(broken > 0, float("nan"), best)
    tl.store(values + row * PARTS + part, best.to(tl.float64))
    tl.store(places + row * PARTS + part, place.to(tl.int64))


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    values: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    scores: tl.tensor,
    drawn: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    share: tl.tensor,
    start_id: tl.tensor,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row, part): the best score of `share` columns, fp64, and its column; none in greedy rows."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature == 0:
        return
    every = tl.arange(0, PARTS_PAD)
    largest = tl.max(tl.load(values + row * PARTS + every, mask=every < PARTS, other=float("-inf")), axis=0)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    first = part * share
    last = tl.minimum(first + share, columns)
    best = tl.full([], float("-inf"), tl.float64)
    place = first
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < last, other=float("-inf")).to(tl.float64)
        counter = (column.to(tl.int64) + (start_id + 1)).to(tl.uint64)
        score = (x - largest) / temperature + gumbel(counter, key)
        score = tl.where(column < last, score, float("-inf"))
        top = tl.max(score, axis=0)
        found = tl.min(tl.where((score == top) & (column < last), column, 2147483647), axis=0)
        place = tl.where(top > best, found, place)
        best = tl.where(top > best, top, best)
    tl.store(scores + row * PARTS + part, best)
    tl.store(drawn + row * PARTS + part, place.to(tl.int64))


@triton.jit
def winner_kernel(
    logits: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    scores: tl.tensor,
    drawn: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    start_id: tl.tensor,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
) -> None:
    """Program (row): the parts' candidates into out fp64 `[rows, 4]`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    real = part < PARTS
    value = tl.load(values + row * PARTS + part, mask=real, other=float("-inf"))
    broken = tl.max((value != value).to(tl.int32), axis=0) > 0
    largest = tl.max(tl.where(value != value, float("-inf"), value), axis=0)
    temperature = tl.load(temperatures + row)
    if temperature == 0:
        tied = tl.min(tl.where((value == largest) & real, part, PARTS_PAD), axis=0)
        tied = tl.minimum(tied, PARTS - 1)  # nothing but NaN
        column = tl.load(places + row * PARTS + tied)
        noise = tl.full([], 0.0, tl.float64)
        logit = largest
        token = (column + start_id).to(tl.float64)
    else:
        score = tl.load(scores + row * PARTS + part, mask=real, other=float("-inf"))
        top = tl.max(score, axis=0)
        tied = tl.min(tl.where((score == top) & real, part, PARTS_PAD), axis=0)
        tied = tl.minimum(tied, PARTS - 1)
        column = tl.load(drawn + row * PARTS + tied)
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        found = top > float("-inf")
        noise = tl.where(found, gumbel((column + (start_id + 1)).to(tl.uint64), key), 0.0)
        logit = tl.load(logits + row * stride + column).to(tl.float64)
        logit = tl.where(found, logit, float("-inf"))
        token = tl.where(found, (column + start_id).to(tl.float64), -1.0)
    nan = tl.full([], float("nan"), tl.float64)
    tl.store(out + 4 * row, tl.where(broken, nan, largest))
    tl.store(out + 4 * row + 1, tl.where(broken, nan, logit))
    tl.store(out + 4 * row + 2, noise)
    tl.store(out + 4 * row + 3, token)


def local_winners(logits: Tensor, temperatures: Tensor, keys: Tensor, start: int) -> Tensor:
    """See the twin. Three launches, whose grid follows from the shape of the logits alone."""
    rows, columns = logits.shape
    out = torch.empty(rows, 4, dtype=torch.float64, device=logits.device)
    if not columns:
        for place, value in enumerate((-torch.inf, -torch.inf, 0.0, -1.0)):
            out[:, place] = value
    if not rows or not columns:
        return out
    parts = min(_MOST_PARTS, triton.cdiv(columns, 2 * _BLOCK))
    share = triton.cdiv(columns, parts)
    parts = triton.cdiv(columns, share)
    values, scores = torch.empty(2, rows, parts, dtype=torch.float64, device=logits.device)
    places, drawn = torch.empty(2, rows, parts, dtype=torch.int64, device=logits.device)
    pad = triton.next_power_of_2(parts)
    stride = logits.stride(0)
    largest_kernel[(rows, parts)](
        logits, values, places, columns, stride, share, PARTS=parts, BLOCK=_BLOCK, num_warps=4
    )
    draw_kernel[(rows, parts)](
        logits,
        values,
        temperatures,
        keys,
        scores,
        drawn,
        columns,
        stride,
        share,
        start,
        PARTS=parts,
        PARTS_PAD=pad,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    winner_kernel[(rows,)](
        logits,
        values,
        places,
        scores,
        drawn,
        temperatures,
        keys,
        out,
        stride,
        start,
        PARTS=parts,
        PARTS_PAD=pad,
        num_warps=2,
    )
    return out
