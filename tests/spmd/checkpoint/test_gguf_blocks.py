"""GGUF types as blocks that layers compute on, against the gguf package's own reading of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd.checkpoint.assembly import Assembly
from spmd.checkpoint.gguf_blocks import COMPUTED_KINDS
from spmd.checkpoint.gguf_source import GGUFSource
from spmd.checkpoint.stored import Region

NAME, STORED = "model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}
OTHERS = sorted(set(COMPUTED_KINDS) - {"Q8_0", "Q4_0", "Q4_1", "Q4_K"})


def random_blocks(rows: int, values: int, type_name: str) -> np.ndarray:
    """Random bytes, with scales between 2**-15 and 2, either sign."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    raw = np.random.default_rng(3).integers(0, 256, (rows, values // block_size, block_bytes), dtype=np.uint8)
    scales = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
    for place in scales.get(type_name, [0]):
        raw[:, :, place + 1] &= 0xBF
    return raw.reshape(rows, -1)


def written(write_gguf: Callable[..., Path], type_name: str) -> tuple[GGUFSource, torch.Tensor]:
    """A file with one matrix `[20, 768]`, and its values."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = random_blocks(20, 768, type_name)
    path = write_gguf("qwen2", HEADS, {STORED: (raw, type_name)})
    return GGUFSource(path), torch.from_numpy(dequantize(raw, GGMLQuantizationType[type_name]))


def test_q4_k_differs_by_the_rounding_of_its_scales_alone(write_gguf: Callable[..., Path]) -> None:
    source, want = written(write_gguf, "Q4_K")
    blocks = source.read_blocks(NAME)
    assert blocks is not None
    assert blocks.kind == "Q4_1"
    groups = want.reshape(20, -1, 32)
    low, high = groups.amin(-1), groups.amax(-1)
    # The scale and the minimum are each off by 2**-11 of themselves.
    numbers = (blocks.dequantize() - want).reshape(groups.shape).abs().amax(-1)
    assert (numbers <= 2**-11 * (2 * (high - low) + low.abs() + high.abs()) + 1e-6).all()
    assert numbers.max() > 0


@pytest.mark.parametrize("type_name", OTHERS)
def test_others_are_rounded_to_8_bits(write_gguf: Callable[..., Path], type_name: str) -> None:
    source, want = written(write_gguf, type_name)
    blocks = source.read_blocks(NAME)
    assert blocks is not None
    assert blocks.kind == "Q8_0"
    groups = want.reshape(20, -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    error = (blocks.dequantize().reshape(groups.shape) - groups).abs()
    assert (error <= 0.5 * step * (1 + 2**-9) + 127 * (2**-11 * step + 2**-25)).all()  # of the fp16 scale


@pytest.mark.parametrize("type_name", ["Q4_1", "Q4_K", "Q6_K", "Q5_0"])
def test_slices_are_parts_of_the_whole_however_they_come(
    write_gguf: Callable[..., Path], type_name: str
) -> None:
    source, _ = written(write_gguf, type_name)
    whole = source.read_blocks(NAME)
    assert whole is not None
    unit = whole.blocks.shape[1] // (768 // 32)
    stored = source.stored(NAME)
    raw = torch.from_numpy(random_blocks(20, 768, type_name))
    for rows, columns in (
        ((3, 17), (32, 608)),
        ((0, 20), (256, 512)),
        ((5, 6), (736, 768)),
        ((4, 4), (0, 32)),
    ):
        part = source.read_blocks(NAME, (slice(*rows), slice(*columns)))
        assert part is not None
        want = whole.blocks[slice(*rows), columns[0] // 32 * unit : columns[1] // 32 * unit]
        assert torch.equal(part.blocks, want)
        assembly = Assembly(stored, (rows, columns), None, blocks=True)
        region = assembly.region
        for row in range(*region.rows):  # row by row, as pieces arrive from other ranks
            piece = Region((row, row + 1), region.columns)
            assembly.place(piece, raw[row : row + 1, slice(*region.columns)].contiguous())
        assert torch.equal(assembly.quantized().blocks, want)
    assert source.read_blocks(NAME, (slice(0, 20), slice(8, 40))) is None
