"""Weights in blocks of 32 numbers with one scale: GGUF's Q8_0, Q4_0, Q4_1 (ggml-common.h, ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
QUANTIZE = {"int8": "Q8_0", "int4": "Q4_1"}  # what `--quantize` makes


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix `[rows, columns]` in blocks along its rows. blocks: uint8 `[rows, columns / 32 * bytes]`.

    Q8_0: fp16 scale d, 32 int8 q; value d * q. Q4_0: d, then 32 4-bit q, numbers 0 to 15 in the low halves of
    16 bytes, 16 to 31 in the high ones; value d * (q - 8). Q4_1: d, fp16 minimum m, 4-bit q; d * q + m.
    """

    kind: str
    blocks: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] // BLOCK_BYTES[self.kind] * BLOCK

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def to(self, device: torch.device) -> QuantizedTensor:
        """The same blocks there."""
        return QuantizedTensor(self.kind, self.blocks.to(device))

    def __getitem__(self, rows: slice | Tensor) -> QuantizedTensor:
        return QuantizedTensor(self.kind, self.blocks[rows])

    def dequantize(self) -> Tensor:
        """fp32 `[rows, columns]`: the plain form, oracle of the kernels that compute on the blocks."""
        rows, columns = self.shape
        if not rows * columns:
            return torch.empty(rows, columns, device=self.device)
        blocks = self.blocks.reshape(rows, columns // BLOCK, BLOCK_BYTES[self.kind])
        scale = blocks[..., :2].contiguous().view(torch.float16).float()
        if self.kind == "Q8_0":
            values = blocks[..., 2:].view(torch.int8).float() * scale
        else:
            start = 4 if self.kind == "Q4_1" else 2
            packed = blocks[..., start:]
            numbers = torch.cat([packed & 15, packed >> 4], dim=-1).float()
            if self.kind == "Q4_1":
                values = numbers * scale + blocks[..., 2:4].contiguous().view(torch.float16).float()
            else:
                values = (numbers - 8) * scale
        return values.reshape(rows, columns)

    @staticmethod
    def quantize(matrix: Tensor, kind: str) -> QuantizedTensor:
        """Round a matrix whose columns are a multiple of 32: Q8_0 against the largest of each block, Q4_1
        between its smallest and largest. Raises `ValueError` for other widths and kinds."""
        rows, columns = matrix.shape
        if columns % BLOCK:
            raise ValueError(f"{columns} columns are not a multiple of {BLOCK}")
        width = columns // BLOCK * BLOCK_BYTES[kind]
        if matrix.is_meta or not width * rows:  # a dry run; a rank without heads
            return QuantizedTensor(kind, torch.empty(rows, width, dtype=torch.uint8, device=matrix.device))
        groups = matrix.float().reshape(rows, columns // BLOCK, BLOCK)
        if kind == "Q8_0":
            scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
            numbers = _divided(groups, scale).round().clamp(-127, 127).to(torch.int8)
            parts = [scale.view(torch.uint8), numbers.view(torch.uint8)]
        elif kind == "Q4_1":
            low = groups.amin(-1, keepdim=True).half()
            scale = ((groups.amax(-1, keepdim=True) - low.float()) / 15).half()
            numbers = _divided(groups - low.float(), scale).round().clamp(0, 15).to(torch.uint8)
            packed = numbers[..., :16] | numbers[..., 16:] << 4
            parts = [scale.view(torch.uint8), low.view(torch.uint8), packed]
        else:
            raise ValueError(f"kind {kind!r}: expected Q8_0 or Q4_1")
        return QuantizedTensor(kind, torch.cat(parts, dim=-1).reshape(rows, width))


def _divided(groups: Tensor, scale: Tensor) -> Tensor:
    wide = scale.float()
    return torch.where(wide == 0, torch.zeros(()), groups / torch.where(wide == 0, torch.ones(()), wide))


Weight = Tensor | QuantizedTensor


def stack_rows(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Matrices one below the other: in blocks if all are, of Q8_0 where their kinds differ; else as plain
    numbers of `dtype`."""
    if len(parts) == 1:
        return parts[0]
    blocks = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(blocks) < len(parts):
        return cat_rows([as_plain(part, dtype) for part in parts])
    kind = blocks[0].kind if len({part.kind for part in blocks}) == 1 else "Q8_0"
    return QuantizedTensor(kind, cat_rows([_as_kind(part, kind).blocks for part in blocks]))


def _as_kind(part: QuantizedTensor, kind: str) -> QuantizedTensor:
    if part.kind == kind:
        return part
    if part.blocks.is_meta:
        rows, columns = part.shape
        return QuantizedTensor(kind, part.blocks.new_empty(rows, columns // BLOCK * BLOCK_BYTES[kind]))
    return QuantizedTensor.quantize(part.dequantize(), kind)


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat`, also on the meta device, where that one would import much of torch for two seconds."""
    if parts[0].is_meta:
        return parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
    return torch.cat(list(parts))


def as_plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix as a tensor of numbers of `dtype`."""
    if isinstance(weight, QuantizedTensor) and weight.blocks.is_meta:
        return weight.blocks.new_empty(weight.shape, dtype=dtype)
    return weight.dequantize().to(dtype) if isinstance(weight, QuantizedTensor) else weight
