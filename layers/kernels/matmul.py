"""Matrix times a few or many rows, on the fastest path the processor has."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows from which one conversion of the weights to fp32 is cheaper than torch's 16-bit loop, whose time
# grows with every row on processors without 16-bit arithmetic (measured on AVX2: break-even at 4).
_CONVERT_FROM_ROWS = 4
_CHUNK_ELEMENTS = 1 << 20


@functools.cache
def _cpu_multiplies_16_bit(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; x `[rows, in]`, weight `[out, in]`, both of one dtype; result `[rows, out]`.

    On a CPU without 16-bit arithmetic, many rows go through fp32 copies of slices of the weights,
    small enough to stay in cache.
    """
    if (
        weight.device.type == "cpu"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and x.shape[0] >= _CONVERT_FROM_ROWS
        and weight.numel()
        and not _cpu_multiplies_16_bit(weight.dtype)
    ):
        return _linear_through_fp32(x, weight, bias)
    return F.linear(x, weight, bias)


def _linear_through_fp32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    wide = x.float()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=weight.dtype)
    buffer = torch.empty(min(rows, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows]
        converted = buffer[: part.shape[0]].copy_(part)
        result = torch.mm(wide, converted.T)
        if bias is not None:
            result += bias[start : start + rows]
        out[:, start : start + rows] = result
    return out
