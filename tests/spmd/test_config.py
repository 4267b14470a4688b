"""ModelConfig against transformers' own reading of the same files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd.comm.errors import UserError
from spmd.config import HIDDEN_ACTS, ModelConfig
from spmd.layers.mlp import ACTIVATIONS
from spmd.loading import computed_dtype
from spmd.rope_config import RopeConfig

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3"]


def read(model_type: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": model_type, **SIZES, **changes})


def reference(tmp_path: Path, config: dict[str, Any]) -> Any:
    """transformers' config object of the same file."""
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(tmp_path)


def reference_model(tmp_path: Path, config: dict[str, Any]) -> Any:
    """transformers' model of the same file, without storage."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(reference(tmp_path, config))


def assert_like_reference(ours: ModelConfig, theirs: Any) -> None:
    heads = theirs.num_attention_heads
    assert ours.model_type == theirs.model_type
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.hidden_act == theirs.hidden_act
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    assert ours.bos_token_id == theirs.bos_token_id
    eos = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    assert ours.eos_token_ids == tuple(i for i in eos if i is not None)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_take_the_defaults_of_transformers(tmp_path: Path, model_type: str) -> None:
    config = {"model_type": model_type, **SIZES, "vocab_size": 40000}
    del config["num_key_value_heads"]
    assert_like_reference(ModelConfig.from_dict(config), reference(tmp_path, config))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_saved_by_transformers_reads_back(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig

    saved = AutoConfig.for_model(
        model_type,
        **SIZES,
        max_position_embeddings=512,
        rms_norm_eps=1e-3,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
        eos_token_id=[7, 5],
        bos_token_id=None,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        dtype="bfloat16",
    )
    saved.save_pretrained(tmp_path)
    config = ModelConfig.from_dict(json.loads((tmp_path / "config.json").read_text()))
    assert_like_reference(config, saved)
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 6}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"head_dim": 16}),
        ("phi3", {}),
    ],
)
def test_biases_norms_and_parameter_count(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    config = {"model_type": model_type, **SIZES, "pad_token_id": None, **changes}
    ours, model = ModelConfig.from_dict(config), reference_model(tmp_path, config)
    parameters = dict(model.named_parameters())  # a tied head appears once
    assert ours.weight_count() == sum(p.numel() for p in parameters.values())
    names = {name.split("layers.0.")[1] for name in parameters if "layers.0." in name}
    assert ours.qkv_bias == ("self_attn.q_proj.bias" in names)
    assert ours.o_bias == ("self_attn.o_proj.bias" in names)
    assert ours.mlp_bias == ("mlp.down_proj.bias" in names)
    assert ours.qk_norm == ("self_attn.q_norm.weight" in names)
    assert ours.query_size == parameters["model.layers.0.self_attn.o_proj.weight"].shape[1]


def test_head_dim_stated_null_absent() -> None:
    four = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert read(**four, head_dim=32).query_size == 128
    assert read(**four, head_dim=32).kv_size == 64
    assert read(**four, head_dim=None).head_dim == 16
    assert read(**four).head_dim == 16
    # Mistral-Nemo: heads x head_dim is not hidden_size, and hidden_size need not divide by heads.
    assert read("mistral", num_attention_heads=5, num_key_value_heads=1, head_dim=128).query_size == 640


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"sliding_window": 16}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 16}),
        ("mistral", {"sliding_window": None}),
        ("phi3", {}),
        ("phi3", {"sliding_window": 16}),
        ("qwen2", {"sliding_window": 16}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}),
        (
            "qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
    ],
)
def test_windows_like_the_layers_of_transformers(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    config = {"model_type": model_type, **SIZES, "pad_token_id": None, **changes}
    model = reference_model(tmp_path, config)
    if model_type.startswith("qwen"):
        expected = [layer.self_attn.sliding_window for layer in model.model.layers]
    elif model_type == "llama":
        expected = [None] * 4
    else:
        expected = [model.config.sliding_window] * 4
    assert list(ModelConfig.from_dict(config).sliding_windows) == expected


def test_family_by_architectures_when_model_type_is_absent() -> None:
    config = {**SIZES, "architectures": ["Qwen2ForCausalLM"]}
    assert ModelConfig.from_dict(config).qkv_bias
    assert ModelConfig.from_dict({**config, "model_type": None}).model_type == "qwen2"


def test_every_end_id_of_both_files() -> None:
    config = {"model_type": "llama", **SIZES}
    both = ModelConfig.from_dict({**config, "eos_token_id": 9}, {"eos_token_id": [4, 9, 3]})
    assert both.eos_token_ids == (9, 4, 3)
    assert ModelConfig.from_dict({**config, "eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    # The family's implied id must not join ids that are stated.
    assert ModelConfig.from_dict(config, {"eos_token_id": 11}).eos_token_ids == (11,)
    assert ModelConfig.from_dict(config, {"temperature": 1}).eos_token_ids == (2,)
    assert ModelConfig.from_dict({**config, "eos_token_id": None}).eos_token_ids == ()
    # Ids that no row of the vocabulary stands for can't end anything.
    outside = ModelConfig.from_dict({**config, "eos_token_id": [-1, 128, 127], "bos_token_id": -1})
    assert outside.eos_token_ids == (127,)
    assert outside.bos_token_id is None


def test_what_is_computed_in() -> None:
    wide = torch.float32
    for wanted, stored, blocks_on_gpu, expected in (
        ("auto", "float32", False, wide),
        ("auto", None, False, wide),
        ("auto", "float16", False, torch.float16),
        ("auto", "float32", True, torch.bfloat16),
        ("auto", None, True, torch.bfloat16),
        ("auto", "float16", True, torch.float16),
        ("float32", "bfloat16", False, wide),
        ("float16", "float32", False, torch.float16),
    ):
        assert computed_dtype(wanted, stored, blocks_on_gpu) == expected
    with pytest.raises(UserError, match="'float64' cannot be computed in; give --dtype"):
        computed_dtype("auto", "float64", False)


def test_dtype_spellings() -> None:
    assert read().dtype is None
    assert read(torch_dtype="float16").dtype == "float16"
    assert read(torch_dtype="float16", dtype="torch.bfloat16").dtype == "bfloat16"


def test_context_limit_of_extended_models() -> None:
    assert read(max_position_embeddings=64).context_limit == 64
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert read(max_position_embeddings=64, head_dim=8, rope_scaling=dynamic).context_limit == 256
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(max_position_embeddings=64, rope_scaling=yarn).context_limit == 256
    assert read(max_position_embeddings=256, rope_scaling=yarn).context_limit == 256


def test_activations_are_those_of_the_mlp_layer() -> None:
    assert set(HIDDEN_ACTS) == set(ACTIVATIONS)


def test_harmless_keys_are_ignored() -> None:
    extra = {
        "use_cache": True,
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "auto_map": {},
        "logit_scale": 1.0,
    }
    assert read(**extra, quantization_config=None) == read()


# Rotary spellings

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope(**changes: Any) -> RopeConfig:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    return read(**{**sizes, "max_position_embeddings": 131072, "rope_theta": 5e5, **changes}).rope


def test_kind_under_either_key_or_both() -> None:
    spellings = [{"rope_type": "llama3"}, {"type": "llama3"}, {"type": "llama3", "rope_type": "llama3"}]
    read_from = {rope(rope_scaling={**LLAMA3, **spelling}) for spelling in spellings}
    read_from.add(rope(rope_theta=None, rope_parameters={**LLAMA3, "rope_type": "llama3", "rope_theta": 5e5}))
    assert len(read_from) == 1
    one = read_from.pop()
    assert (one.kind, one.theta, one.factor, one.original_max_positions) == ("llama3", 5e5, 8.0, 8192)
    # transformers lets rope_type win
    assert rope(rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 2.0}).kind == "dynamic"
    assert rope(rope_scaling={"type": "linear", "rope_type": None, "factor": 2.0}).kind == "linear"
    assert rope(rope_scaling={}).kind == "default"


def test_nested_base_wins_over_the_top_level(tmp_path: Path) -> None:
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    variants: list[tuple[dict[str, Any], float]] = [
        (nested, 500000.0),
        ({"rope_theta": 500000.0}, 500000.0),
        ({"rope_theta": 10000.0, **nested}, 500000.0),
        ({}, 10000.0),
    ]
    for changes, theta in variants:
        config = {"model_type": "llama", **SIZES, **changes}
        assert ModelConfig.from_dict(config).rope.theta == theta
        assert reference(tmp_path, config).rope_parameters["rope_theta"] == theta


def test_both_blocks_merge_when_they_agree() -> None:
    old, new = {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "rope_theta": 7e5}
    merged = rope(rope_scaling=old, rope_parameters=new)
    assert (merged.kind, merged.theta, merged.factor) == ("linear", 7e5, 2.0)


def test_equal_parameters_per_layer_type_are_one() -> None:
    each = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}
    nested = rope(rope_parameters={"full_attention": each, "sliding_attention": dict(each)})
    assert nested == rope(rope_parameters=each)


def test_original_length_at_the_top_level_wins(tmp_path: Path) -> None:
    """Even beside a nested one; this is what transformers' own rotary table ends up with."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    changes = {
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }
    theirs = reference(tmp_path, {"model_type": "llama", **SIZES, **changes})
    ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert theirs.rope_parameters["original_max_position_embeddings"] == 64
    assert read(**changes).rope.original_max_positions == 64


def test_phi3_long_context_names_and_partial_rotation() -> None:
    factors = {"short_factor": [1] * 6, "long_factor": [2.0] * 6}
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 32,
    }
    for word in ("longrope", "su", "yarn"):
        block = {"type": word, **factors}
        got = read("phi3", **sizes, rope_scaling=block, partial_rotary_factor=0.75).rope
        assert (got.kind, got.rotary_dim, got.factor) == ("longrope", 12, 4.0)
        assert got.original_max_positions == 32
        assert got.short_factor == (1.0,) * 6
    inside = read("phi3", **sizes, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    assert inside.rope.rotary_dim == 8


def test_frequency_divisors_of_gguf() -> None:
    got = read(num_attention_heads=4, num_key_value_heads=2, rope_freq_factors=[1.0] * 7 + [8.0])
    assert got.rope.freq_factors == (1.0,) * 7 + (8.0,)


# Refusals: what is wrong, and the words the message must hold


def linear(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "linear", "factor": 2.0, **changes}}


WRONG: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mamba", {}, ["'mamba'", "llama", "phi3"]),
    (
        "llama",
        {"model_type": None, "architectures": ["GPT2LMHeadModel"]},
        ["GPT2LMHeadModel", "LlamaForCausalLM"],
    ),
    ("llama", {"model_type": None}, ["not stated", "llama"]),
    ("llama", {"hidden_size": None}, ["hidden_size", "missing"]),
    ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ("llama", {"num_hidden_layers": -2}, ["num_hidden_layers", "-2"]),
    ("llama", {"vocab_size": 128.0}, ["vocab_size", "128.0", "integer"]),
    ("llama", {"vocab_size": True}, ["vocab_size", "True"]),
    ("llama", {"intermediate_size": "96"}, ["intermediate_size", "'96'"]),
    ("llama", {"num_attention_heads": 30, "head_dim": 8}, ["num_attention_heads", "30", "multiple", "8"]),
    ("llama", {"num_attention_heads": 24}, ["hidden_size", "64", "24", "head_dim"]),
    ("llama", {"head_dim": 7}, ["head_dim", "7", "even"]),
    ("llama", {"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
    ("llama", {"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    ("llama", {"hidden_act": "mish"}, ["hidden_act", "'mish'", "silu"]),
    ("llama", {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
    ("llama", {"attention_bias": 1}, ["attention_bias", "1", "true or false"]),
    ("mistral", {"attention_bias": True}, ["attention_bias", "mistral"]),
    ("qwen2", {"mlp_bias": True}, ["mlp_bias", "qwen2"]),
    ("mistral", {"sliding_window": 0}, ["sliding_window", "0"]),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers", "-1"]),
    ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "4"]),
    ("qwen2", {"layer_types": ["linear_attention"] * 4}, ["linear_attention"]),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4}, ["sliding_attention", "use_sliding_window"]),
    (
        "mistral",
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        ["layer_types", "full_attention"],
    ),
    ("llama", {"attention_multiplier": 0.01}, ["attention_multiplier", "0.01"]),
    ("llama", {"logits_scaling": 8.0}, ["logits_scaling", "8.0"]),
    ("llama", {"num_local_experts": 8}, ["num_local_experts", "8"]),
    ("llama", {"is_causal": False}, ["is_causal", "False"]),
    ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, ["awq", "safetensors", ".gguf"]),
    ("llama", {"eos_token_id": "2"}, ["eos_token_id", "'2'"]),
    ("llama", {"eos_token_id": [1, None]}, ["eos_token_id"]),
    ("llama", {"eos_token_id": True}, ["eos_token_id", "True"]),
    ("llama", {"bos_token_id": [1]}, ["bos_token_id", "[1]"]),
    ("llama", {"dtype": 16}, ["dtype", "16"]),
    ("llama", {"rope_scaling": {"rope_type": "nosuch"}}, ["'nosuch'", "llama3"]),
    ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, ["'mrope'"]),
    ("phi3", linear(), ["'linear'", "longrope"]),
    ("llama", {"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
    ("llama", linear(factor=None), ["factor", "missing"]),
    ("llama", linear(factor=-1.0), ["factor", "-1.0"]),
    ("llama", linear(rope_theta="1e6"), ["rope_theta", "'1e6'"]),
    (
        "llama",
        {**linear(), "rope_parameters": {"rope_type": "default"}},
        ["rope_parameters", "disagree", "rope_type"],
    ),
    (
        "llama",
        {**linear(), "rope_parameters": {"type": "linear", "factor": 4.0}},
        ["disagree", "factor", "4.0"],
    ),
    (
        "qwen3",
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            }
        },
        ["full_attention", "sliding_attention", "different"],
    ),
    ("qwen3", {"rope_parameters": {"full_attention": {}, "sliding_attention": None}}, ["sliding_attention"]),
    (
        "llama",
        {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "low_freq_factor": None}},
        ["low_freq_factor"],
    ),
    (
        "llama",
        {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "high_freq_factor": 1}},
        ["high_freq_factor"],
    ),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, ["factor", "missing"]),
    ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "llama"]),
    ("phi3", {"num_attention_heads": 8, "partial_rotary_factor": 0.4}, ["rotary dimension is 3", "even"]),
    ("phi3", {"num_attention_heads": 8, "partial_rotary_factor": 2}, ["rotary dimension is 16"]),
    (
        "phi3",
        {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0, 1.0]}},
        ["long_factor", "2 numbers", "expected 1"],
    ),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, ["long_factor", "missing"]),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [0.0], "long_factor": [1.0]}}, ["short_factor"]),
    ("llama", {"rope_freq_factors": [1.0, 2.0]}, ["rope_freq_factors", "2 numbers", "expected 1"]),
    (
        "llama",
        {"rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "rope_freq_factors": [1.0]},
        ["rope_freq_factors", "llama3", "twice"],
    ),
]


@pytest.mark.parametrize(("model_type", "changes", "words"), WRONG)
def test_refused_by_name(model_type: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        ModelConfig.from_dict({"model_type": model_type, **SIZES, **changes})
    for word in words:
        assert word in str(refusal.value)


def test_refuses_what_is_not_a_mapping() -> None:
    with pytest.raises(UserError, match="mapping"):
        ModelConfig.from_dict([])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="generation config"):
        ModelConfig.from_dict({"model_type": "llama", **SIZES}, "eos")  # type: ignore[arg-type]
