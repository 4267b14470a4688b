"""Tensors of GGUF files in Hugging Face names and layouts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.open_files import open_files

from spmd.checkpoint import source as source_module
from spmd.checkpoint.gguf_source import GGUFSource
from spmd.comm.errors import UserError

HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}
QUERY, KEY = "blk.0.attn_q.weight", "blk.0.attn_k.weight"
HF_QUERY, HF_KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As in llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def random_values(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def random_blocks(rows: int, values: int, type_name: str) -> np.ndarray:
    """Random bytes of a quantized matrix, with scales that are finite."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    raw = np.random.default_rng(1).integers(0, 256, (rows, values // block_size, block_bytes), dtype=np.uint8)
    halves = raw[:, :, 1::2]
    halves &= 0x3F  # a float16 whose high byte is below 0x40 is a number
    return raw.reshape(rows, -1)


def _slices(size: int) -> st.SearchStrategy[slice]:
    pair = st.tuples(st.integers(0, size), st.integers(0, size))
    return pair.map(lambda ends: slice(min(ends), max(ends)))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_gguf_package_quantized(write_gguf: Callable[..., Path], type_name: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    values = random_values(24, 96)
    kind = GGMLQuantizationType[type_name]
    expected = torch.from_numpy(np.array(dequantize(quantize(values, kind), kind)))
    path = write_gguf("qwen2", HEADS, {"blk.0.ffn_down.weight": (values, type_name)})
    with GGUFSource(path) as source:
        name = "model.layers.0.mlp.down_proj.weight"
        assert source.names() == [name]
        assert source.shape(name) == (24, 96)
        assert source.dtype_name(name) == type_name
        assert source.file_of(name) == str(path)
        assert torch.equal(source.read(name, dtype=torch.float32), expected)
        assert torch.equal(
            source.read(name, (slice(5, 19), slice(7, 90)), torch.float32), expected[5:19, 7:90]
        )
        stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(type_name, torch.float32)
        assert source.read(name).dtype == stored


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ2_0"])
def test_types_the_gguf_package_only_reads(write_gguf: Callable[..., Path], type_name: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = random_blocks(40, 768, type_name)
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType[type_name]))
    path = write_gguf("qwen2", HEADS, {"blk.0.ffn_up.weight": (raw, type_name)})
    with GGUFSource(path) as source:
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(source.read(name), expected)
        assert torch.equal(source.read(name, (slice(3, 4), slice(250, 520))), expected[3:4, 250:520])


@pytest.mark.parametrize("type_name", ["I32", "Q8_K"])
def test_types_that_are_no_weights(write_gguf: Callable[..., Path], type_name: str) -> None:
    raw = random_blocks(2, 256, type_name)
    path = write_gguf("qwen2", HEADS, {"output_norm.weight": (raw, type_name)})
    with GGUFSource(path) as source:
        for method in (source.read, source.stored):
            with pytest.raises(UserError, match=rf"output_norm.* is stored as {type_name}"):
                method("model.norm.weight")


@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> tuple[GGUFSource, dict[str, torch.Tensor]]:
    """A llama file with interleaved q and k rows (heads of 8), and the values in Hugging Face's order."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    path = tmp_path_factory.mktemp("permuted") / "model.gguf"
    writer = GGUFWriter(path, "llama")
    for key, value in HEADS.items():
        writer.add_uint32(f"llama.{key}", value)
    expected = {}
    for gguf_name, hf_name, heads in [(QUERY, HF_QUERY, 4), (KEY, HF_KEY, 2)]:
        values = random_values(heads * 8, 128)
        kind = GGMLQuantizationType.Q4_1
        writer.add_tensor(gguf_name, quantize(llama_cpp_permute(values, heads), kind), raw_dtype=kind)
        expected[hf_name] = torch.from_numpy(dequantize(quantize(values, kind), kind))
        bias = random_values(heads * 8)
        writer.add_tensor(gguf_name.replace("weight", "bias"), llama_cpp_permute(bias, heads))
        expected[hf_name.replace("weight", "bias")] = torch.from_numpy(bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(path), expected


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_slice_of_interleaved_rows(
    permuted: tuple[GGUFSource, dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    source, expected = permuted
    assert source.names() == sorted(expected)
    name = data.draw(st.sampled_from(sorted(expected)))
    whole = expected[name]
    index = data.draw(st.tuples(*(_slices(size) for size in whole.shape)))[
        : data.draw(st.integers(0, whole.dim()))
    ]
    part = source.read(name, index)
    assert torch.equal(part, whole[index])
    assert part.is_contiguous()
    if whole.dim() == 2:
        rows = index[:1] or (slice(None),)
        blocks = source.read_blocks(name, (*rows, slice(32, 96)))
        assert blocks is not None
        assert torch.equal(blocks.dequantize(), whole[(*rows, slice(32, 96))])


def test_only_the_needed_rows_are_read(permuted: tuple[GGUFSource, dict[str, torch.Tensor]]) -> None:
    source, _ = permuted
    for index, rows in [
        ((slice(0, 32),), 32),
        ((slice(8, 16),), 8),  # one head
        ((slice(3, 5),), 6),  # with those that lie between them in the file
        ((slice(0, 32), slice(64, 128)), 32),
        ((slice(0, 1), slice(31, 33)), 1),
        ((slice(4, 4),), 0),
    ]:
        before = source.bytes_read
        source.read(HF_QUERY, index)
        assert source.bytes_read - before == rows * 4 * 20, index


def test_large_tensors_are_read_in_pieces(
    permuted: tuple[GGUFSource, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = permuted
    monkeypatch.setattr(source_module, "PIECE_BYTES", 300)
    assert torch.equal(source.read(HF_QUERY, (slice(1, 30), slice(5, 100))), expected[HF_QUERY][1:30, 5:100])


def test_three_dimensions_and_unknown_names(write_gguf: Callable[..., Path]) -> None:
    values = random_values(3, 4, 32)
    path = write_gguf(
        "qwen3", HEADS, {"blk.0.something.weight": (values, "F32"), "blk.0.new": (values, "F32")}
    )
    with GGUFSource(path) as source:
        assert source.names() == ["blk.0.new", "blk.0.something.weight"]
        part = source.read("blk.0.new", (slice(1, 3), slice(1, 4), slice(3, 9)))
        assert torch.equal(part, torch.from_numpy(values[1:3, 1:4, 3:9]))


def test_tensors_outlive_the_source(write_gguf: Callable[..., Path]) -> None:
    values = random_values(4, 32)
    path = write_gguf("qwen3", HEADS, {"output.weight": (values, "F32")})
    source = GGUFSource(path)
    read = source.read("lm_head.weight")
    assert path in open_files()
    source.close()
    assert path not in open_files()
    assert torch.equal(read, torch.from_numpy(values))


def tiny_reference(model_type: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    extra: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if model_type == "llama" else {}
    config = AutoConfig.for_model(
        model_type,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=2,
        intermediate_size=96,
        vocab_size=128,
        max_position_embeddings=128,
        pad_token_id=0,
        tie_word_embeddings=False,
        **extra,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "phi3"])
def test_whole_models_keep_their_hugging_face_names(write_gguf: Callable[..., Path], model_type: str) -> None:
    """Oracle: the gguf package's own table of names, and llama.cpp's permutation."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    expected = tiny_reference(model_type).state_dict()
    name_map = get_tensor_name_map(MODEL_ARCH[model_type.upper()], 2)
    tensors = {}
    for name, value in expected.items():
        gguf_name = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        stored = value.numpy()
        if model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            stored = llama_cpp_permute(stored, 4 if ".q_proj." in name else 2)
        tensors[gguf_name] = (stored, "F32")
    with GGUFSource(write_gguf(model_type, HEADS, tensors)) as source:
        assert source.names() == sorted(expected)
        for name, value in expected.items():
            assert torch.equal(source.read(name), value), name


def test_other_models_are_refused(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"general\.architecture is 'mamba'"):
        GGUFSource(write_gguf("mamba", HEADS, {"output.weight": (random_values(2, 32), "F32")}))
    with pytest.raises(UserError, match="a mixture of 8 experts"):
        GGUFSource(write_gguf("llama", HEADS | {"expert_count": 8}, {}))
    with pytest.raises(UserError, match=r"llama.attention.head_count differs between layers \(\[4, 8\]\)"):
        GGUFSource(write_gguf("llama", {"attention.head_count": [4, 8]}, {}))
    with pytest.raises(UserError, match=r"llama.attention.head_count is 0, expected a positive integer"):
        GGUFSource(write_gguf("llama", {"attention.head_count": 0}, {}))
    with pytest.raises(UserError, match=r"no llama\.attention\.head_count"):
        GGUFSource(write_gguf("llama", {}, {"output.weight": (random_values(2, 32), "F32")}))
    with pytest.raises(UserError, match=r"blk.0.attn_q.weight .*does not consist of 4 heads"):
        GGUFSource(write_gguf("llama", HEADS, {QUERY: (random_values(4, 32), "F32")}))


def test_rope_factors_are_no_tensors(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf("llama", HEADS, {"rope_freqs.weight": (np.array([1, 2, 8], np.float32), "F32")})
    with GGUFSource(path) as source:
        assert source.names() == []
        assert source.rope_factors("rope_freqs.weight") == [1.0, 2.0, 8.0]
        assert source.rope_factors("rope_factors_long.weight") is None


def test_split_files(write_gguf: Callable[..., Path]) -> None:
    values = {"token_embd.weight": random_values(8, 32), "output.weight": random_values(8, 32) + 1}
    parts = []
    for number, (name, value) in enumerate(values.items(), start=1):
        split = {"split.no": number - 1, "split.count": 2}
        file = f"tiny-{number:05d}-of-00002.gguf"
        parts.append(write_gguf("qwen2", HEADS if number == 1 else {}, {name: (value, "F32")}, split, file))
    for part in parts:
        with GGUFSource(part) as source:
            assert source.metadata["qwen2.attention.head_count"] == 4
            assert source.names() == ["lm_head.weight", "model.embed_tokens.weight"]
            assert torch.equal(source.read("lm_head.weight"), torch.from_numpy(values["output.weight"]))
            assert source.file_of("lm_head.weight") == str(parts[1])
    renamed = parts[0].with_name("renamed.gguf")
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(UserError, match="llama-gguf-split --merge"):
        GGUFSource(renamed)
    parts[1].unlink()
    with pytest.raises(UserError, match=f"{parts[1].name} is not in"):
        GGUFSource(parts[0])


def test_pages_of_the_file_are_not_the_process_s(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf("llama", {"attention.head_count": 1}, {QUERY: (np.zeros((64, 32), np.float32), "F32")})
    with GGUFSource(path) as source:
        source.read(HF_QUERY)
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_file_that_ends_early_after_all(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf("qwen2", HEADS, {"output.weight": (random_values(8, 32), "Q8_0")})
    with GGUFSource(path) as source:
        os.truncate(path, path.stat().st_size - 40)
        for method in (source.read, source.read_blocks):
            with pytest.raises(UserError, match=f"{path} is truncated: tensor lm_head.weight needs"):
                method("lm_head.weight")
