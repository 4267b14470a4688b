"""Turning stored GGUF blocks into numbers."""

from __future__ import annotations

import numpy as np
import torch

from spmd.checkpoint.gguf_file import GGUFTensorInfo
from spmd.comm.errors import UserError

FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NUMPY_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}

# The gguf package converts 16 rows at a time; rows of this many values keep its intermediates in the cache
# and make it two to four times faster than the short rows of a small model.
_VALUES_PER_ROW = 8192


def decode(raw: np.ndarray, info: GGUFTensorInfo, file: str) -> torch.Tensor:
    """Values of whole blocks. `raw` is contiguous uint8 `[rows, blocks * block_bytes]`; the result is
    `[rows, blocks * block_size]`, in the stored type for floats and in float32 for quantized types."""
    rows = raw.shape[0]
    if info.type_name == "BF16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    if info.type_name in _NUMPY_FLOATS:
        return torch.from_numpy(raw.view(_NUMPY_FLOATS[info.type_name]))
    flat = raw.reshape(-1)
    row_bytes = max(1, _VALUES_PER_ROW // info.block_size) * info.block_bytes
    whole = flat.size // row_bytes * row_bytes
    pieces = [flat[:whole].reshape(-1, row_bytes), flat[whole:].reshape(1, -1)]
    values = [_dequantize(piece, info, file).reshape(-1) for piece in pieces if piece.size]
    return torch.from_numpy(np.concatenate(values) if len(values) > 1 else values[0]).view(rows, -1)


def _dequantize(raw: np.ndarray, info: GGUFTensorInfo, file: str) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(raw, GGMLQuantizationType(info.type_id))
    except NotImplementedError:
        raise UserError(
            f"tensor {info.name} in {file} is stored as {info.type_name}, which can't be read as weights; "
            f"use a file with another quantization"
        ) from None
