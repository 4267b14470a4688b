"""Tiny models on disk, made by transformers and by gguf's own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def llama_reference() -> Any:
    """A Hugging Face Llama: hidden 64, 4 heads, 2 KV heads, 2 layers, untied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=96,
        vocab_size=128,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def llama_folder(tmp_path: Path, llama_reference: Any) -> Path:
    """That model saved in one file."""
    folder = tmp_path / "one-file"
    llama_reference.save_pretrained(folder)
    return folder


@pytest.fixture
def sharded_folder(tmp_path: Path, llama_reference: Any) -> Path:
    """That model saved in several files with an index."""
    folder = tmp_path / "sharded"
    llama_reference.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 4
    return folder


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file: `write("llama", {"embedding_length": 64}, {"token_embd.weight": (array, "Q8_0")})`.

    Arrays of float32 are quantized by the gguf package; uint8 arrays are taken as quantized already.
    """

    def write(
        architecture: str,
        entries: dict[str, Any],
        tensors: dict[str, tuple[np.ndarray, str]],
        extra: dict[str, Any] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        from gguf import GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize

        path = tmp_path / name
        writer = GGUFWriter(path, architecture)
        entries = {f"{architecture}.{key}": value for key, value in entries.items()} | (extra or {})
        for key, value in entries.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for tensor_name, (values, type_name) in tensors.items():
            kind = GGMLQuantizationType[type_name]
            raw = values if values.dtype == np.uint8 else quantize(values, kind)
            writer.add_tensor(tensor_name, raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
