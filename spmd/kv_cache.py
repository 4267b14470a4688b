"""The key and value tensors of one rank: its layers, its KV heads, in blocks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.block_pool import BLOCK_SIZE


class KVCache:
    """Key and value tensors `[num_blocks * BLOCK_SIZE, kv_heads, head_dim]` of each layer of this stage."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        shape = (num_blocks * BLOCK_SIZE, num_kv_heads, head_dim)
        # torch.empty leaves host pages untouched, so memory grows with the tokens actually held.
        self.keys: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values: list[Tensor] = [
            torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)
        ]

    @staticmethod
    def bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * BLOCK_SIZE * num_kv_heads * head_dim * dtype.itemsize
