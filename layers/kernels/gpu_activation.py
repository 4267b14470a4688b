"""The gated activation of an MLP: activation(gate) * up (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SILU, GELU, GELU_TANH, RELU = (tl.constexpr(number) for number in range(4))
KINDS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "gelu_new": 2,
    "gelu_pytorch_tanh": 2,
    "relu": 3,
}


@triton.jit
def gated_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == SILU:
        active = gate * tl.sigmoid(gate)
    elif KIND == GELU:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == GELU_TANH:
        # (1 + tanh(y)) / 2 = sigmoid(2 y)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = tl.where(gate > 0, gate, gate * 0.0)  # a NaN stays one
    active = active.to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_stride + column, (active * up).to(out.dtype.element_ty), mask=inside)


def gated_activation(gate_up: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """gate_up `[rows, 2 * inner]`, gate first -> `[rows, inner]`. Raises `KeyError` for an unknown kind."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(rows, inner)
    if rows and inner:
        block = min(1024, triton.next_power_of_2(inner))
        gated_kernel[(rows, triton.cdiv(inner, block))](
            gate_up,
            out,
            inner,
            gate_up.stride(0),
            out.stride(0),
            KIND=KINDS[kind],
            BLOCK=block,
            num_warps=4,
        )
    return out
