"""A decoder layer as plain tensors, the form in which fused stages take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spmd.layers.quantized import Weight


@dataclass(frozen=True)
class LayerShards:
    """One layer's shards on this rank. Matrices `[out, in]`, biases and norms `[out]`."""

    kv_index: Sequence[int]  # the local KV head of each local query head, in order
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    window: int | None
    eps: float
    activation: str
    input_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Weight
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
