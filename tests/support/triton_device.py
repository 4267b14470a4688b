"""Where checks of Triton kernels run: on a GPU in every type if there is one, else interpreted in fp32."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter rounds bf16 wrongly, and is slow: few and small shapes there.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float16: {"rtol": 1e-2, "atol": 4e-3}}.get(
        dtype, {"rtol": 3e-2, "atol": 3e-2}
    )
