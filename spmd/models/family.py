"""What distinguishes one model family from another: a table of names beside a common decoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Tensor names of one decoder layer, relative to `model.layers.N`.

    qkv and gate_up list the checkpoint tensors packed into one matrix, in order. A name that repeats is
    one tensor that already holds those parts stacked.
    """

    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, str] = ("mlp.gate_proj", "mlp.up_proj")
