"""Stored GGUF types as the blocks that layers compute on.

Q8_0, Q4_0 and Q4_1 are computed on as they are. A block of Q4_K is eight blocks of Q4_1 whose scales are
products of two numbers, rounded to fp16 here: 5 bits a weight instead of 4.5, off by 1 / 2000 of a scale. All
other types become Q8_0, 8.5 bits a weight: its steps are at most a quarter of those that 5 and 6 bits have
in the part of the block with the larger scale. Layouts: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from spmd.layers.quantized import BLOCK, BLOCK_BYTES, QuantizedTensor

_TO_Q8_0 = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
COMPUTED_KINDS = {**{kind: kind for kind in BLOCK_BYTES}, "Q4_K": "Q4_1", **dict.fromkeys(_TO_Q8_0, "Q8_0")}

_Q4_K_BYTES, _Q4_K_PARTS = 144, 8


def to_computed(raw: np.ndarray, type_name: str, decode: Callable[[np.ndarray], Tensor]) -> Tensor:
    """Whole stored blocks, uint8 `[rows, bytes]`, as blocks of `COMPUTED_KINDS[type_name]`, likewise.

    decode: gives the values `[rows, columns]` of stored blocks.
    """
    if COMPUTED_KINDS[type_name] == type_name:
        return torch.from_numpy(raw)
    if type_name == "Q4_K":
        return torch.from_numpy(_q4_k_as_q4_1(raw))
    return QuantizedTensor.quantize(decode(raw), COMPUTED_KINDS[type_name]).blocks


def _q4_k_as_q4_1(raw: np.ndarray) -> np.ndarray:
    """d, dmin (fp16), eight 6-bit scales and minimums in 12 bytes, 256 4-bit numbers: of each 32 bytes, low
    halves are one part of 32 numbers and high halves the next."""
    rows = raw.shape[0]
    blocks = raw.reshape(-1, _Q4_K_BYTES)
    head = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    packed = blocks[:, 16:].reshape(-1, _Q4_K_PARTS // 2, 1, BLOCK)
    numbers = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, _Q4_K_PARTS, BLOCK)
    out = np.empty((len(blocks), _Q4_K_PARTS, BLOCK_BYTES["Q4_1"]), dtype=np.uint8)
    for place, factor, parts in ((0, head[:, :1], scales), (2, -head[:, 1:], minimums)):
        halves = (factor * parts.astype(np.float32)).astype(np.float16)[..., None]
        out[..., place : place + 2] = halves.view(np.uint8)
    half = BLOCK // 2
    out[..., 4:] = numbers[..., :half] | numbers[..., half:] << 4
    return out.reshape(rows, -1)
