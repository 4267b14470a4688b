"""Matrix products whose weights may be stored in fewer bits than they are computed with: plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd.layers.quantized import Weight, as_plain

_CHUNK_ELEMENTS = 1 << 20


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; x `[rows, in]`, weight `[out, in]`, result `[rows, out]` of x's dtype.

    Weights of another dtype, or in blocks, go through copies of slices small enough to stay in cache.
    """
    if isinstance(weight, Tensor) and weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    rows = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    buffer = torch.empty(min(rows, weight.shape[0]), weight.shape[1], dtype=x.dtype, device=x.device)
    for start in range(0, weight.shape[0], rows):
        part = as_plain(weight[start : start + rows], x.dtype)
        converted = buffer[: part.shape[0]].copy_(part)
        out[:, start : start + rows] = torch.mm(x, converted.T)
    return out if bias is None else out.add_(bias)
