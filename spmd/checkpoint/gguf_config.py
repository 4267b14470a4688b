"""A Hugging Face `config.json` made from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from spmd.checkpoint.gguf_metadata import GGUFMetadata
from spmd.checkpoint.gguf_source import GGUFSource
from spmd.comm.errors import UserError

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_TOKEN_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unknown": "unk_token_id",
    "padding": "pad_token_id",
}
_END_IDS = ("eos", "eot", "eom")


def config_from_gguf(metadata: dict[str, Any], source: GGUFSource) -> dict[str, Any]:
    """The model's configuration in the form of a Hugging Face `config.json`.

    One key is ours: `rope_freq_factors`, the per-frequency divisors (`[rotary_dim / 2]`) that llama.cpp
    computes from Llama 3's rotary scaling, whose parameters are not in the file.

    Raises `UserError` naming a metadata entry that is missing or that the models here can't honour.
    """
    model = GGUFMetadata(metadata, source.location)
    names = set(source.names())
    sliding_window = model.get("attention.sliding_window") or None
    # Mistral's files say llama; a window is what tells the ones apart that differ.
    model_type = "mistral" if model.architecture == "llama" and sliding_window else model.architecture
    hidden_size, num_heads = model.count("embedding_length"), model.num_heads
    head_dim = _head_dim(model, source, names)
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "vocab_size": _vocab_size(model, source, names),
        "hidden_size": hidden_size,
        "intermediate_size": model.count("feed_forward_length"),
        "num_hidden_layers": model.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.require("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": model.count("context_length"),
        "sliding_window": sliding_window,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "torch_dtype": _dtype(source, names),
        "rope_parameters": _rope_parameters(model, source, head_dim),
    }
    for token, key in _TOKEN_IDS.items():
        config[key] = metadata.get(f"tokenizer.ggml.{token}_token_id")
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
    if model_type == "llama":
        config["mlp_bias"] = "model.layers.0.mlp.down_proj.bias" in names
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if model_type == "phi3" and key in config["rope_parameters"]:
            config[key] = config["rope_parameters"][key]
    factors = source.rope_factors("rope_freqs.weight")
    if factors is not None:
        config["rope_freq_factors"] = factors
    return config


def generation_config_from_gguf(metadata: dict[str, Any]) -> dict[str, Any]:
    """What `generation_config.json` would say: sampling defaults, and the ids that end a text, a turn or a
    message."""
    config: dict[str, Any] = {hf: metadata[gguf] for gguf, hf in _SAMPLING.items() if gguf in metadata}
    found = (metadata.get(f"tokenizer.ggml.{end}_token_id") for end in _END_IDS)
    end_ids = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
    if end_ids:
        config["eos_token_id"] = end_ids
    return config


def _vocab_size(model: GGUFMetadata, source: GGUFSource, names: set[str]) -> int:
    if "model.embed_tokens.weight" in names:
        return source.shape("model.embed_tokens.weight")[0]
    return model.count("vocab_size")


def _head_dim(model: GGUFMetadata, source: GGUFSource, names: set[str]) -> int:
    key_length = model.get("attention.key_length")
    value_length = model.get("attention.value_length", key_length)
    if key_length != value_length:
        raise UserError(
            f"{model.file}: keys have {key_length} values a head and values {value_length}; models where "
            f"they are equal are supported"
        )
    if key_length is not None:
        return int(key_length)
    query = "model.layers.0.self_attn.q_proj.weight"
    if query in names:
        return source.shape(query)[0] // model.num_heads
    return model.count("embedding_length") // model.num_heads


def _dtype(source: GGUFSource, names: set[str]) -> str:
    """The type of the matrices when all are 16-bit floats; anything else is read as float32."""
    stored = {source.dtype_name(name) for name in names if len(source.shape(name)) > 1}
    return (
        {"F16": "float16", "BF16": "bfloat16"}.get(stored.pop(), "float32") if len(stored) == 1 else "float32"
    )


def _rope_parameters(model: GGUFMetadata, source: GGUFSource, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": model.get("rope.freq_base", 10000.0)}
    rotary_dim = model.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        if model.architecture == "llama":
            raise UserError(
                f"{model.file}: llama.rope.dimension_count is {rotary_dim} but heads have {head_dim} values; "
                f"llama models that rotate whole heads are supported"
            )
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    long, short = (source.rope_factors(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    original_length = model.get("rope.scaling.original_context_length")
    attention_factor = model.get("rope.scaling.attn_factor")
    kind = model.get("rope.scaling.type", "none")
    if long is not None and short is not None:
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        rope["original_max_position_embeddings"] = original_length or model.count("context_length")
        if attention_factor is not None:
            rope["attention_factor"] = attention_factor
        return rope
    factor = model.get("rope.scaling.factor") or model.get("rope.scale_linear")
    if kind == "none" and model.get("rope.scale_linear", 1.0) != 1.0:
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": factor}
    if original_length is not None:
        rope["original_max_position_embeddings"] = original_length
    if kind == "yarn":
        rope |= _yarn_parameters(model, factor, attention_factor)
    return rope


def _yarn_parameters(
    model: GGUFMetadata, factor: float | None, attention_factor: float | None
) -> dict[str, Any]:
    if factor is None:
        raise UserError(f"{model.file}: yarn scaling without {model.architecture}.rope.scaling.factor")
    if model.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UserError(f"{model.file}: rope.scaling.yarn_ext_factor other than 1 is not supported")
    found = {key: model.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    parameters = {key: value for key, value in found.items() if value is not None}
    scale = model.get("rope.scaling.yarn_attn_factor", attention_factor)
    if scale is not None:
        # llama.cpp multiplies YaRN's own magnitude by this; Hugging Face's attention_factor replaces it.
        parameters["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
    return parameters
