"""Turning stored bytes into numbers: floats, and the blocks of GGUF."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from spmd.comm.errors import UserError

FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types by their names, which GGUF and safetensors share."""

_NUMPY_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}

# The gguf package converts 16 rows at a time; rows of this many values keep its intermediates in the cache
# and make it two to four times faster than the short rows of a small model.
_VALUES_PER_ROW = 8192


def decodable(type_names: Iterable[str]) -> frozenset[str]:
    """Those of the types that `decode` knows."""
    return frozenset(name for name in set(type_names) if name in FLOAT_TYPES or _has_blocks_of(name))


def undecodable(name: str, file: str, type_name: str) -> UserError:
    """What is said of a tensor whose type is not `decodable`."""
    return UserError(
        f"tensor {name} in {file} is stored as {type_name}, which can't be read as weights; use a file with "
        f"another quantization"
    )


def decode(raw: np.ndarray, type_name: str, block: tuple[int, int]) -> torch.Tensor:
    """Values of whole blocks. `raw` is contiguous uint8 `[rows, blocks * block_bytes]`; `block`: values in a
    block, and their bytes. The result is `[rows, blocks * values]`, in the stored type for floats and in
    float32 for others. Raises `NotImplementedError` for a type that is not `decodable`."""
    rows = raw.shape[0]
    if type_name == "BF16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    if type_name in _NUMPY_FLOATS:
        return torch.from_numpy(raw.view(_NUMPY_FLOATS[type_name]))
    flat = raw.reshape(-1)
    size, block_bytes = block
    row_bytes = max(1, _VALUES_PER_ROW // size) * block_bytes
    whole = flat.size // row_bytes * row_bytes
    pieces = [flat[:whole].reshape(-1, row_bytes), flat[whole:].reshape(1, -1)]
    values = [_dequantize(piece, type_name).reshape(-1) for piece in pieces if piece.size]
    return torch.from_numpy(np.concatenate(values) if len(values) > 1 else values[0]).view(rows, -1)


def _dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(raw, GGMLQuantizationType[type_name])


def _has_blocks_of(type_name: str) -> bool:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if type_name not in GGMLQuantizationType.__members__:
        return False
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    try:
        _dequantize(np.zeros((1, block_bytes), dtype=np.uint8), type_name)
    except NotImplementedError:
        return False
    return True
