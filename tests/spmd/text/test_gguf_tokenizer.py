"""Tokenizers built from GGUF metadata, against `transformers` and the models' documented pipelines."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from spmd.comm.errors import UserError
from spmd.text.gguf_tokenizer import tokenizer_from_gguf
from spmd.text.tokenizer import Tokenizer as ModelTokenizer

PIECES = [
    "the",
    " quick",
    "é",
    " ",
    "  ",
    "\n",
    "\t",
    "中",
    "🌶",
    "it's",
    "IT'S",
    "1",
    "1234",
    " 12",
    "Aé",
    "!?",
    "<b>",
]


Metadata = Callable[..., dict[str, Any]]


def texts(seed: int, count: int, pieces: list[str] = PIECES) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choices(pieces, k=generator.randrange(1, 12))) for _ in range(count)]


@pytest.fixture(scope="session")
def byte_level_metadata(train_byte_level: Callable[..., Tokenizer]) -> Metadata:
    """byte_level_metadata(pre, **changes): the tiny trained BPE as a GGUF file states it."""
    trained = json.loads(train_byte_level().to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].__getitem__)

    def make(pre: str | None, **changes: Any) -> dict[str, Any]:
        metadata = {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*tokens, "<think>", "<｜end▁of▁turn｜>"],
            "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3) + [4, 3],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in trained["merges"]],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            **changes,
        }
        return {name: value for name, value in metadata.items() if value is not None}

    return make


def from_file(metadata: dict[str, Any], folder: Path) -> Any:
    """What `transformers` makes of a GGUF file with this metadata."""
    from gguf import GGUFWriter
    from transformers import AutoTokenizer

    writer = GGUFWriter(folder / "model.gguf", metadata["general.architecture"])
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    for name, value in metadata.items():
        if name == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(str(folder), gguf_file="model.gguf")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2", None])
def test_byte_level_equals_transformers(
    pre: str | None, tmp_path: Path, byte_level_metadata: Metadata
) -> None:
    metadata = byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": pre == "llama-bpe"})
    reference = from_file(metadata, tmp_path)
    tokenizer = tokenizer_from_gguf(metadata)
    for text in [*texts(0, 300), "<s>the <think> fox</s>", ""]:
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "x  123 a", ["x", "Ġ", "Ġ", "1", "2", "3", "Ġa"]),
        ("gpt-2", "x  123 a", ["x", "Ġ", "Ġ123", "Ġa"]),
        ("llama-bpe", "x 12345\n\n a", ["x", "Ġ", "123", "45", "ĊĊ", "Ġa"]),
        ("qwen2", "IT'S 12", ["IT", "'S", "Ġ", "1", "2"]),
        ("tekken", "helloWorld 12", ["hello", "World", "Ġ", "1", "2"]),
        ("deepseek-v3", "ab,cd 1234中x", ["ab", ",cd", "Ġ", "123", "4", "ä¸Ń", "x"]),
        ("deepseek-coder", "ab 12", ["ab", "Ġ", "1", "2"]),
    ],
)
def test_pieces_before_merging(pre: str, text: str, pieces: list[str], byte_level_metadata: Metadata) -> None:
    """Split by hand, by the expressions in the models' tokenizer.json."""
    split = tokenizer_from_gguf(byte_level_metadata(pre)).backend.pre_tokenizer.pre_tokenize_str(text)
    joined = [piece for piece, _ in split]
    if pre == "smollm":
        # Digits are cut off first, then GPT-2's expression sees the two spaces alone and keeps them together.
        pieces = ["x", "ĠĠ", "1", "2", "3", "Ġa"]
    assert joined == pieces


def test_a_whole_piece_in_the_vocabulary_wins_over_merges(byte_level_metadata: Metadata) -> None:
    """tiktoken's rule, ignore_merges in the tokenizer.json of Llama 3 and Mistral's tekken."""
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)):
        metadata = byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": False})
        metadata["tokenizer.ggml.tokens"].append("zqzq")  # no merges make it
        metadata["tokenizer.ggml.token_type"].append(1)
        ids = tokenizer_from_gguf(metadata).encode("zqzq")
        assert (ids == [len(metadata["tokenizer.ggml.tokens"]) - 1]) == whole


def test_a_rule_for_every_special_kind_of_token(byte_level_metadata: Metadata) -> None:
    """Control tokens are special, user-defined ones are whole but shown."""
    tokenizer = tokenizer_from_gguf(byte_level_metadata("gpt-2"))
    think, end = tokenizer.size - 2, tokenizer.size - 1
    ids = tokenizer.encode("the<think>fox<｜end▁of▁turn｜>")
    assert think in ids
    assert ids[-1] == end
    assert tokenizer.decode(ids) == "the<think>fox"
    assert not tokenizer.id_is_special(think)
    assert tokenizer.id_is_special(end)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_sentencepiece_equals_transformers(
    architecture: str, tmp_path: Path, sentencepiece_metadata: Metadata, corpus: list[str]
) -> None:
    changes = {"general.architecture": architecture}
    if architecture == "gemma2":
        changes["tokenizer.ggml.add_space_prefix"] = False
    metadata = sentencepiece_metadata(**changes)
    reference = from_file(metadata, tmp_path)
    tokenizer = tokenizer_from_gguf(metadata)
    pieces = [*PIECES, " fox", "x,.", "q", "</s>", "<|turn|>", "<think>"]
    for text in [*texts(1, 300, pieces), *corpus, ""]:
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert ids[0] == 1  # llama.cpp and transformers: SentencePiece files that don't say get BOS


def test_sentencepiece_falls_back_to_bytes(sentencepiece_metadata: Metadata) -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": False}))
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("the quick 中")]
    assert tokens == ["▁the", "▁quick", "▁", "<0xE4>", "<0xB8>", "<0xAD>"]


def test_gemma_spells_runs_of_spaces_as_user_defined_tokens(sentencepiece_metadata: Metadata) -> None:
    metadata = sentencepiece_metadata(
        **{"general.architecture": "gemma2", "tokenizer.ggml.add_space_prefix": False}
    )
    index = metadata["tokenizer.ggml.tokens"].index("▁▁")
    metadata["tokenizer.ggml.tokens"][index] = "  "
    metadata["tokenizer.ggml.token_type"][index] = 4
    tokenizer = tokenizer_from_gguf(metadata)
    assert index in tokenizer.encode("a  b")
    assert tokenizer.decode(tokenizer.encode("a  b   c")) == "a  b   c"


@pytest.mark.parametrize(
    ("flags", "front", "back"),
    [
        ({}, [], []),
        ({"tokenizer.ggml.add_bos_token": True}, [0], []),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [0], [1]),
        ({"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.pre": "llama-bpe"}, [], []),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [0], []),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 2**32 - 1}, [], []),
    ],
)
def test_bos_and_eos_follow_the_flags(
    flags: dict[str, Any], front: list[int], back: list[int], byte_level_metadata: Metadata
) -> None:
    """C22, the GGUF path"""
    tokenizer = tokenizer_from_gguf(byte_level_metadata("gpt-2", **flags))
    bare = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == front + bare + back


def test_end_ids(byte_level_metadata: Metadata) -> None:
    """C11: eos, eot and eom of the file, and end-of-turn tokens it only lists as control tokens."""
    metadata = byte_level_metadata("gpt-2", **{"tokenizer.ggml.eot_token_id": 2})
    assert tokenizer_from_gguf(metadata).eos_token_ids == {1, 2}
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>", "<end_of_turn>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 1, 3]
    assert tokenizer_from_gguf(metadata).eos_token_ids == {1, 2, size, size + 2}
    metadata["tokenizer.ggml.tokens"] += ["<|return|>"]
    metadata["tokenizer.ggml.token_type"] += [3]
    assert tokenizer_from_gguf(metadata).eos_token_ids == {1, 2, size}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"tokenizer.ggml.pre": "nosuch"}, "'nosuch'"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.tokens": []}, "tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries"),
        ({"tokenizer.ggml.merges": ["zq zzq"]}, "merges"),
    ],
)
def test_metadata_that_makes_no_tokenizer(
    change: dict[str, Any], found: str, byte_level_metadata: Metadata
) -> None:
    with pytest.raises(UserError, match=found):
        tokenizer_from_gguf({**byte_level_metadata("gpt-2"), **change})


def test_default_model(smollm2: ModelTokenizer, corpus: list[str]) -> None:
    assert smollm2.encode("🌶") == [10813, 230, 131]
    assert smollm2.eos_token_ids == {2}
    assert smollm2.size == 49152
    for text in [*texts(2, 300), *corpus]:
        assert smollm2.decode(smollm2.encode(text)) == text


def test_default_model_equals_its_documented_pipeline(smollm2: ModelTokenizer, smollm2_path: Path) -> None:
    """SmolLM2's tokenizer.json cuts digits off one by one, then applies GPT-2's expression.

    transformers' GGUF conversion leaves the digits out (it differs after two spaces): they are put back here.
    """
    from transformers import AutoTokenizer

    reference: Tokenizer = AutoTokenizer.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name
    ).backend_tokenizer
    without_digits = [text for text in texts(3, 300) if not any(char.isdigit() for char in text)]
    assert len(without_digits) > 30
    for text in without_digits:
        assert smollm2.encode(text) == reference.encode(text).ids
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in texts(4, 1000):
        assert smollm2.encode(text) == reference.encode(text).ids


def test_default_model_builds_fast(smollm2_metadata: dict[str, Any]) -> None:
    start = time.process_time()
    tokenizer_from_gguf(smollm2_metadata)
    assert time.process_time() - start < 1.0  # seconds of CPU; about 0.15 when the machine is free


def test_split_expressions_compile() -> None:
    from spmd.text.gguf_pretokenizers import _SPLITS

    for splits in _SPLITS.values():
        for split in splits:
            Regex(split)
