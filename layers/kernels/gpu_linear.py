"""Products of activations with weights of any kind on a GPU: which kernel takes which shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd.layers.kernels.fp8 import Fp8Weight
from spmd.layers.kernels.gpu_blocks import blocks_few_rows, blocks_many_rows
from spmd.layers.kernels.gpu_matmul import few_rows, fp8_many_rows
from spmd.layers.quantized import QuantizedTensor, Weight

FEW_ROWS = 4


def linear(
    x: Tensor, weight: Weight | Fp8Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`: x `[rows, in]` -> `[rows, out]` of x's dtype, fp32 sums.

    Up to `FEW_ROWS` rows are limited by reading the weights, where a kernel of our own reads them at full
    speed and in the bits they are stored in. More rows of plain weights are cuBLAS's.
    """
    rows, columns = x.shape[0], weight.shape[0]
    if isinstance(weight, Tensor) and (rows > FEW_ROWS or weight.dtype != x.dtype or not x.shape[1]):
        product = F.linear(x, weight.to(x.dtype), bias)
        return product if out is None else out.copy_(product)
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows or not columns:
        return out
    if not x.shape[1]:  # of a rank without heads, say
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    if isinstance(weight, QuantizedTensor):
        (blocks_few_rows if rows <= FEW_ROWS else blocks_many_rows)(x, weight, bias, out)
    elif isinstance(weight, Fp8Weight) and rows > FEW_ROWS:
        fp8_many_rows(x, weight, bias, out)
    else:
        few_rows(x, weight, bias, out)
    return out
