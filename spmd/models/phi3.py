"""Phi-3: Llama's layer, stored with q, k, v stacked in one tensor, and gate, up in another."""

from spmd.models.family import Family

PHI3 = Family(qkv=("self_attn.qkv_proj",) * 3, gate_up=("mlp.gate_up_proj",) * 2)
