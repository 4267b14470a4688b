"""Weights in blocks: the plain form against the gguf package, the kernels against the plain form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize

from spmd.layers.kernels.cpu_matmul import matmul_columns, matmul_scratch_bytes
from spmd.layers.kernels.matmul import linear
from spmd.layers.kernels.quantized_tiles import QUANTIZED_KINDS
from spmd.layers.quantized import QuantizedTensor, stack_rows

KINDS = list(QUANTIZED_KINDS)


def in_blocks(matrix: torch.Tensor, kind: str) -> QuantizedTensor:
    """Quantized by the gguf package, not by us."""
    raw = gguf_quantize(matrix.numpy(), GGMLQuantizationType[kind])
    return QuantizedTensor(kind, torch.from_numpy(np.ascontiguousarray(raw)))


def product(x: torch.Tensor, weight: QuantizedTensor, bounds: list[int]) -> torch.Tensor:
    rows, inner = x.shape
    columns = weight.shape[0]
    out = torch.full((rows, columns), 7.0)
    scratch = torch.empty(matmul_scratch_bytes(inner), dtype=torch.uint8)
    for first, last in itertools.pairwise(bounds):
        matmul_columns(
            QUANTIZED_KINDS[weight.kind],
            x.data_ptr(),
            4 * inner,
            rows,
            weight.blocks.data_ptr(),
            weight.blocks.stride(0),
            first,
            last,
            inner,
            out.data_ptr(),
            4 * columns,
            scratch.data_ptr(),
        )
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_form_is_gguf(kind: str) -> None:
    torch.manual_seed(0)
    weight = in_blocks(torch.randn(7, 96) * torch.logspace(-3, 3, 7)[:, None], kind)
    want = dequantize(weight.blocks.numpy(), GGMLQuantizationType[kind])
    torch.testing.assert_close(weight.dequantize(), torch.from_numpy(want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 16, 17])
@pytest.mark.parametrize(("columns", "inner"), [(1, 32), (33, 576), (5, 4160), (18, 64), (4, 0)])
def test_products(kind: str, rows: int, columns: int, inner: int) -> None:
    torch.manual_seed(rows)
    matrix = torch.randn(columns, inner)
    weight = in_blocks(matrix, kind) if inner else QuantizedTensor(kind, torch.empty(columns, 0).byte())
    x = torch.randn(rows, inner) * torch.logspace(-2, 2, rows)[:, None]
    if rows > 1 and inner:
        x[1, :32] = 0  # a block of zeros has no scale
    want = (x.double() @ weight.dequantize().double().T).float()
    size = x.norm(dim=1, keepdim=True) * (1 + weight.dequantize().norm(dim=1))  # of what is summed
    got = product(x, weight, [0, columns // 3, columns])
    assert ((got - want).abs() <= 2e-5 * size).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_visible(kind: str, value: float) -> None:
    weight = in_blocks(torch.randn(3, 64), kind)
    x = torch.randn(1, 64)
    x[0, 40] = value
    assert not product(x, weight, [0, 3]).isfinite().any()


@pytest.mark.parametrize(("kind", "worst"), [("Q8_0", 0.006), ("Q4_1", 0.09)])
def test_rounding_a_matrix(kind: str, worst: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 256)
    matrix[3] = 0
    matrix[4, :32] = 2.5
    ours = QuantizedTensor.quantize(matrix, kind)
    theirs = in_blocks(matrix, kind)
    error = (ours.dequantize() - matrix).norm() / matrix.norm()
    assert error < worst
    assert error <= (theirs.dequantize() - matrix).norm() / matrix.norm() * 1.02
    assert (ours.dequantize()[3] == 0).all()


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="33 columns"):
        QuantizedTensor.quantize(torch.zeros(2, 33), "Q8_0")


def test_stacked_rows_and_the_plain_product() -> None:
    torch.manual_seed(0)
    first, second = in_blocks(torch.randn(5, 64), "Q4_0"), in_blocks(torch.randn(3, 64), "Q4_0")
    stacked = stack_rows([first, second], torch.float32)
    assert isinstance(stacked, QuantizedTensor)
    wider = in_blocks(torch.randn(3, 64), "Q8_0")
    mixed = stack_rows([first, wider], torch.bfloat16)
    assert isinstance(mixed, QuantizedTensor)
    assert mixed.kind == "Q8_0"
    assert torch.equal(mixed[5:].blocks, wider.blocks)
    step = first.dequantize().abs().amax() / 127
    assert (mixed[:5].dequantize() - first.dequantize()).abs().max() <= 0.6 * step
    plain = stack_rows([first, torch.randn(3, 64).bfloat16()], torch.bfloat16)
    assert isinstance(plain, torch.Tensor)
    assert plain.dtype == torch.bfloat16
    x = torch.randn(4, 64)
    want = x @ torch.cat([first.dequantize(), second.dequantize()]).T
    torch.testing.assert_close(linear(x, stacked), want)
