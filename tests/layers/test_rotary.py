"""Rotary tables and rotation against transformers, for every scaling kind and for mixed lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd.config import ModelConfig
from spmd.layers.rope_scaling import RopeConfig, attention_scale, inverse_frequencies
from spmd.layers.rotary import Rotary, apply_rotary

SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.5 * i for i in range(32)],
}
LONG_PART = {key: LONG[key] if key == "type" else LONG[key][:24] for key in LONG}

# (family, config changes). The context is 256 tokens, 64 before extension where the kind has that.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {"rope_theta": 5e5}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64}),
    "llama3": (
        "llama",
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "yarn": (
        "qwen2",
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "yarn-options": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.707,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "yarn-attention-factor": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.25,
            }
        },
    ),
    "yarn-null-factor": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}},
    ),
    "longrope": ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
    "longrope-factor": (
        "phi3",
        {"rope_scaling": {**LONG, "factor": 32.0}, "original_max_position_embeddings": 64},
    ),
    "longrope-attention-factor": (
        "phi3",
        {"rope_scaling": {**LONG, "attention_factor": 1.5}, "original_max_position_embeddings": 64},
    ),
    "longrope-unextended": (
        "phi3",
        {"rope_scaling": LONG, "original_max_position_embeddings": 256},
    ),
    "longrope-partial": (
        "phi3",
        {
            "rope_scaling": LONG_PART,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
        },
    ),
    "default-partial": ("phi3", {"partial_rotary_factor": 0.5}),
}
LENGTHS = [1, 30, 63, 64, 65, 100, 256]


def build(kind: str) -> tuple[Rotary, Any]:
    """Ours, and a maker of transformers' fresh rotary module (it remembers the longest sequence it met)."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    model_type, changes = KINDS[kind]
    values = {"max_position_embeddings": 256, **SIZES, **changes}
    module = {"llama": LlamaRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding, "phi3": Phi3RotaryEmbedding}[
        model_type
    ]

    def theirs() -> Any:
        import copy

        return module(AutoConfig.for_model(model_type, **copy.deepcopy(values)))

    config = ModelConfig.from_dict({"model_type": model_type, **values})
    return Rotary(config.rope, config.head_dim, "cpu"), theirs


def reference_rows(theirs: Any, length: int) -> tuple[Tensor, Tensor]:
    cos, sin = theirs()(torch.zeros(1, dtype=torch.float32), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_tables_equal_transformers(kind: str, length: int) -> None:
    rotary, theirs = build(kind)
    cos, sin = rotary.cos_sin(torch.arange(length), torch.full((length,), length))
    expected_cos, expected_sin = reference_rows(theirs, length)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos, expected_cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, expected_sin, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_of_other_lengths_change_nothing(kind: str) -> None:
    rotary, _ = build(kind)
    alone = [rotary.cos_sin(torch.arange(n), torch.full((n,), n)) for n in LENGTHS]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    lengths = torch.cat([torch.full((n,), n) for n in LENGTHS])
    shuffled = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))
    cos, sin = rotary.cos_sin(positions[shuffled], lengths[shuffled])
    assert torch.equal(cos, torch.cat([pair[0] for pair in alone])[shuffled])
    assert torch.equal(sin, torch.cat([pair[1] for pair in alone])[shuffled])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(kind: str, dtype: torch.dtype) -> None:
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    rotary, theirs = build(kind)
    length = 50
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(length, 4, 64, generator=generator).to(dtype)
    key = torch.randn(length, 2, 64, generator=generator).to(dtype)
    cos, sin = rotary.cos_sin(torch.arange(length), torch.full((length,), length))
    their_cos, their_sin = theirs()(query, torch.arange(length)[None])
    expected_query, expected_key = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], their_cos, their_sin
    )
    tolerance = 1e-5 if dtype == torch.float32 else 0.0
    for x, expected in ((query, expected_query), (key, expected_key)):
        got = apply_rotary(x, cos, sin)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected[0].transpose(0, 1), atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope-partial"])
@pytest.mark.parametrize(("tokens", "heads"), [(0, 3), (5, 0), (0, 0)])
def test_no_tokens_or_no_heads(kind: str, tokens: int, heads: int) -> None:
    rotary, _ = build(kind)
    cos, sin = rotary.cos_sin(torch.arange(tokens), torch.full((tokens,), tokens))
    assert cos.shape == sin.shape == (tokens, rotary.rope.rotary_dim // 2)
    assert apply_rotary(torch.ones(tokens, heads, 64), cos, sin).shape == (tokens, heads, 64)


def test_rotation_leaves_its_input_alone_and_takes_views() -> None:
    rotary, _ = build("default-partial")
    packed = torch.randn(6, 10, 64, generator=torch.Generator().manual_seed(2))
    before = packed.clone()
    cos, sin = rotary.cos_sin(torch.arange(6), torch.full((6,), 6))
    got = apply_rotary(packed[:, 4:6], cos, sin)
    assert torch.equal(packed, before)
    assert torch.equal(got, apply_rotary(before[:, 4:6].contiguous(), cos, sin))
    assert torch.equal(got[..., 32:], before[:, 4:6, 32:])


# Numbers from public bug reports


def test_llama3_divisors() -> None:
    plain = RopeConfig("default", theta=5e5, rotary_dim=64, max_positions=131072)
    scaled = RopeConfig(
        "llama3",
        theta=5e5,
        rotary_dim=64,
        max_positions=131072,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )
    ratio = inverse_frequencies(scaled) / inverse_frequencies(plain)
    expected = torch.tensor([1, 1, 0.6437, 0.3711, 0.1902, 0.125, 0.125])
    torch.testing.assert_close(ratio[[0, 10, 15, 16, 17, 18, 31]], expected, atol=1e-4, rtol=0)
    # The same model as GGUF stores it: no kind, but divisors.
    divisors = tuple((1 / ratio).tolist())
    stored = RopeConfig("default", theta=5e5, rotary_dim=64, max_positions=131072, freq_factors=divisors)
    torch.testing.assert_close(inverse_frequencies(stored), inverse_frequencies(scaled), atol=0, rtol=1e-6)


def test_dynamic_base_grows_beyond_the_limit_only() -> None:
    rope = RopeConfig("dynamic", theta=1e4, rotary_dim=64, max_positions=64, factor=4.0)
    rotary = Rotary(rope, 64, "cpu")
    plain = Rotary(RopeConfig("default", theta=1e4, rotary_dim=64, max_positions=64), 64, "cpu")
    last = rotary.inv_freq(torch.tensor([32, 64, 65, 128]))[:, -1]
    expected = torch.tensor([1.333522e-04, 1.333522e-04, 1.255079e-04, 2.667043e-05])
    torch.testing.assert_close(last, expected, atol=0, rtol=1e-6)
    for length in (1, 32, 64):
        short = torch.arange(length), torch.full((length,), length)
        assert all(map(torch.equal, rotary.cos_sin(*short), plain.cos_sin(*short)))


def test_dynamic_with_frequency_divisors_divides_at_every_length() -> None:
    divisors = tuple(1.0 + i for i in range(32))
    plain = RopeConfig("dynamic", theta=1e4, rotary_dim=64, max_positions=64, factor=4.0)
    divided = RopeConfig(
        "dynamic", theta=1e4, rotary_dim=64, max_positions=64, factor=4.0, freq_factors=divisors
    )
    lengths = torch.tensor([10, 200])
    expected = Rotary(plain, 64, "cpu").inv_freq(lengths) / torch.tensor(divisors)
    torch.testing.assert_close(Rotary(divided, 64, "cpu").inv_freq(lengths), expected)


def test_longrope_picks_its_table_by_each_length() -> None:
    rope = RopeConfig(
        "longrope",
        theta=1e4,
        rotary_dim=16,
        max_positions=128,
        factor=4.0,
        original_max_positions=32,
        short_factor=(1.0,) * 8,
        long_factor=tuple(1 + 0.5 * i for i in range(8)),
    )
    rotary = Rotary(rope, 16, "cpu")
    assert rotary.switch_length == 32
    assert rope.length_dependent
    plain = torch.tensor([1e4 ** (-i / 8) for i in range(8)])
    long = plain / torch.tensor(rope.long_factor)
    got = rotary.inv_freq(torch.tensor([10, 33, 32, 128]))
    torch.testing.assert_close(got, torch.stack([plain, long, plain, long]), atol=0, rtol=1e-6)


def test_longrope_attention_factor() -> None:
    factors = {"short_factor": (1.0,) * 8, "long_factor": (2.0,) * 8}
    rope = RopeConfig(
        "longrope",
        theta=1e4,
        rotary_dim=16,
        max_positions=256,
        factor=4.0,
        original_max_positions=64,
        **factors,
    )
    assert attention_scale(rope) == pytest.approx(1.154701, abs=1e-6)
    assert attention_scale(rope) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_only_longrope_switches_tables(kind: str) -> None:
    rotary, _ = build(kind)
    assert rotary.switch_length is None
    assert rotary.rope.length_dependent == (kind == "dynamic")


@pytest.mark.parametrize("rotary_dim", [0, 7, 18])
def test_refuses_an_impossible_rotary_dimension(rotary_dim: int) -> None:
    with pytest.raises(ValueError, match="rotary_dim"):
        Rotary(RopeConfig("default", theta=1e4, rotary_dim=rotary_dim, max_positions=8), 16, "cpu")
