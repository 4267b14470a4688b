"""GGUF tensor names and their Hugging Face counterparts."""

from __future__ import annotations

import re

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Phi-3 stores gate and up as one matrix under the name of the second.
_LAYER_OF = {"phi3": _LAYER | {"ffn_up": "mlp.gate_up_proj"}}

# Not weights: they belong to the rotary embedding's configuration.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_PATTERN = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def hf_name(architecture: str, gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name with no counterpart is returned as it is."""
    match = _PATTERN.fullmatch(gguf_name)
    if match is None:
        return gguf_name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    table = _GLOBAL if layer is None else _LAYER_OF.get(architecture, _LAYER)
    if part not in table:
        return gguf_name
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{table[part]}.{kind}"


def heads_to_unpermute(architecture: str, gguf_name: str, num_heads: int, num_kv_heads: int) -> int | None:
    """Heads whose rows llama.cpp interleaved for its own rotary layout, or None where rows are in order."""
    if architecture != "llama":
        return None
    match = _PATTERN.fullmatch(gguf_name)
    if match is None or match["layer"] is None:
        return None
    return {"attn_q": num_heads, "attn_k": num_kv_heads}.get(match["part"])
