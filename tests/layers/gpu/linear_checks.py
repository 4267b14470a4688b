"""Products with plain, fp8 and block-quantized weights, one row to many, against torch in fp64."""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE, DTYPES, tolerance

from spmd.layers.kernels.fp8 import Fp8Weight
from spmd.layers.kernels.gpu_table import torch_kernels, triton_kernels
from spmd.layers.quantized import QuantizedTensor

KINDS = ["plain", "fp8", "Q8_0", "Q4_1", "Q4_0"]
TWIN, KERNEL = torch_kernels().linear, triton_kernels().linear


def stored(matrix: torch.Tensor, kind: str, dtype: torch.dtype) -> tuple[object, torch.Tensor]:
    """The matrix as stored, and what it then is, fp64."""
    if kind == "plain":
        return matrix.to(dtype), matrix.to(dtype).double()
    if kind == "fp8":
        fp8 = Fp8Weight.quantize(matrix)
        return fp8, fp8.dequantize().double()
    if kind == "Q4_0":
        blocks = QuantizedTensor.quantize(matrix.cpu(), "Q4_1").blocks.view(matrix.shape[0], -1, 20)
        without_minimum = torch.cat([blocks[..., :2], blocks[..., 4:]], dim=-1)
        quantized = QuantizedTensor(kind, without_minimum.reshape(matrix.shape[0], -1).to(DEVICE))
    else:
        made = QuantizedTensor.quantize(matrix.cpu(), kind)
        quantized = QuantizedTensor(kind, made.blocks.to(DEVICE))
    return quantized, quantized.dequantize().double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "inner"),
    [(0, 3, 32), (1, 1, 32), (1, 7, 800), (2, 5, 96), (3, 9, 64), (4, 6, 544), (5, 33, 160), (37, 3, 64)],
)
def test_any_shape(dtype: torch.dtype, kind: str, rows: int, columns: int, inner: int) -> None:
    torch.manual_seed(rows + columns)
    weight, plain = stored(torch.randn(columns, inner, device=DEVICE), kind, dtype)
    x = torch.randn(rows, inner + 8, device=DEVICE).to(dtype)[:, :inner]
    bias = torch.randn(columns, device=DEVICE).to(dtype)
    limits = tolerance(dtype)
    limits["atol"] *= inner**0.5
    for b in (None, bias):
        want = x.double() @ plain.T
        want = (want if b is None else want + b.double()).to(dtype)
        torch.testing.assert_close(KERNEL(x, weight, b), want, **limits)
        torch.testing.assert_close(TWIN(x, weight, b), want, **limits)
    out = torch.full((rows, columns), 7.0, device=DEVICE, dtype=dtype)
    assert KERNEL(x, weight, None, out) is out
    torch.testing.assert_close(out, (x.double() @ plain.T).to(dtype), **limits)


def test_plain_weights_of_any_width() -> None:
    """Inner sizes that are no multiple of anything, as after an uneven split."""
    for inner in (0, 1, 3, 61, 1025):
        x, weight = torch.randn(2, inner, device=DEVICE), torch.randn(5, inner, device=DEVICE)
        torch.testing.assert_close(KERNEL(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("rows", [1, 5])
def test_weights_without_an_inner_width_give_the_bias(kind: str, rows: int) -> None:
    weight: object = QuantizedTensor(kind, torch.zeros(3, 0, dtype=torch.uint8, device=DEVICE))
    if kind == "fp8":
        empty = torch.zeros(3, 0, device=DEVICE).to(torch.float8_e4m3fn)
        weight = Fp8Weight(empty, torch.ones(3, device=DEVICE))
    x, bias = torch.zeros(rows, 0, device=DEVICE), torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    out = torch.full((rows, 3), torch.nan, device=DEVICE)
    assert KERNEL(x, weight, bias, out) is out
    assert out.tolist() == [[1.0, 2.0, 3.0]] * rows
    assert KERNEL(x, weight).tolist() == [[0.0, 0.0, 0.0]] * rows


def test_every_fp8_number() -> None:
    """All 256 patterns by their product with one; NaN stays NaN."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)[:, None]
    for rows in (1, 5):
        x = torch.ones(rows, 1, device=DEVICE)
        found = KERNEL(x, Fp8Weight(numbers, torch.ones(256, device=DEVICE)))
        want = numbers.float()[:, 0].expand(rows, -1)
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
