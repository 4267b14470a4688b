"""Folder tokenizers equal `AutoTokenizer`; their state builds the same tokenizer on another rank."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd.comm.errors import UserError
from spmd.text.tokenizer import Tokenizer, check_prompt_ids, load_tokenizer, stop_ids

TEXTS = [
    "the quick brown fox",
    " it's 2024  and\n\nnaïve café 🌶",
    "</s>the<|user|> x <s>",
    "<extra> the<tool>fox <extra>",
    "",
    "  \t 中文 12  345",
]

GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}

EXTRA = {
    "content": "<extra>",
    "lstrip": True,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": True,
}


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder, None)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        (None, "llama"),
        (GENERIC, "llama"),
        (GENERIC, "mistral"),
        ({**GENERIC, "add_bos_token": True, "add_eos_token": True}, "llama"),
        ({**GENERIC, "added_tokens_decoder": {"500": EXTRA}}, "llama"),
        ({**GENERIC, "additional_special_tokens": ["<extra>", "<tool>"], "pad_token": "<pad>"}, "llama"),
        ({**GENERIC, "eos_token": {"__type": "AddedToken", **EXTRA}, "image_token": "<tool>"}, "llama"),
        ({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}, "llama"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<s>"}, "gpt2"),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, "llama"),
        ({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}, "qwen2"),
        (GENERIC, "qwen2"),
    ],
)
@pytest.mark.parametrize("add_bos", [False, True])
def test_ids_and_text_equal_transformers(
    make_folder: Callable[..., Path], config: dict[str, Any] | None, model_type: str, add_bos: bool
) -> None:
    from transformers import AutoTokenizer

    folder = make_folder(config, add_bos, model_type=model_type)
    reference = AutoTokenizer.from_pretrained(str(folder))
    tokenizer = loaded(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(
            text, add_special_tokens=False
        )
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert tokenizer.special_tokens == reference.special_tokens_map
    assert tokenizer.size == max(reference.get_vocab().values()) + 1


def test_special_tokens_map_of_an_old_folder(make_folder: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    folder = make_folder(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "the"},
        files={
            "special_tokens_map.json": json.dumps({"eos_token": "</s>", "bos_token": "<s>"}),
            "added_tokens.json": json.dumps({"<tool>": 400, "<extra>": 401}),
        },
    )
    reference = AutoTokenizer.from_pretrained(str(folder))
    tokenizer = loaded(folder)
    assert tokenizer.eos_token_ids == {reference.eos_token_id} == {1}
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text).input_ids
    assert [tokenizer.id_is_special(i) for i in (0, 1, 2, 400, 401, 5)] == [
        i in reference.all_special_ids or i == 2 for i in (0, 1, 2, 400, 401, 5)
    ]


def test_padding_and_truncation_of_training_are_not_applied(make_folder: Callable[..., Path]) -> None:
    """C13: a prompt is neither padded nor cut, whatever the tokenizer's files say about batches."""
    folder = make_folder(GENERIC)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = loaded(folder)
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("t")) == 1
    assert tokenizer.special_tokens["pad_token"] == "</s>"


def test_state_builds_the_same_tokenizer_without_transformers(make_folder: Callable[..., Path]) -> None:
    tokenizer = loaded(make_folder({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}, add_bos=True))
    state = pickle.dumps(tokenizer.to_state())
    program = (
        "import pickle, sys\n"
        "from spmd.text.tokenizer import Tokenizer\n"
        "t = Tokenizer.from_state(pickle.loads(sys.stdin.buffer.read()))\n"
        "ids = t.encode(sys.argv[1])\n"
        "print(ids, sorted(t.eos_token_ids), t.eos_token, t.size, 'transformers' in sys.modules)\n"
    )
    root = Path(__file__).parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", program, TEXTS[2]], input=state, capture_output=True, cwd=root, check=True
    )
    expected = f"{tokenizer.encode(TEXTS[2])} [1] </s> {tokenizer.size} False"
    assert answer.stdout.decode().strip() == expected


def test_a_verbatim_folder_is_read_without_transformers(make_folder: Callable[..., Path]) -> None:
    program = (
        "import sys; from pathlib import Path; from spmd.text.tokenizer import load_tokenizer\n"
        "load_tokenizer(Path(sys.argv[1])); assert 'transformers' not in sys.modules"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program, str(make_folder(GENERIC))], cwd=root, check=True)


def test_ids_without_a_token_decode_to_nothing(make_folder: Callable[..., Path]) -> None:
    tokenizer = loaded(make_folder(GENERIC))
    ids = tokenizer.encode("the fox")
    assert tokenizer.decode([tokenizer.size, *ids, 2**31, 2**40, -1]) == "the fox"
    assert not tokenizer.id_is_special(2**40)


def test_files_that_are_missing_or_broken(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path / "model0", None) is None
    folder = make_folder(GENERIC)
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(folder, None)
    folder = make_folder(files={"tokenizer_config.json": "[1]"})
    with pytest.raises(UserError, match=r"tokenizer_config\.json.*object"):
        load_tokenizer(folder, None)
    folder = make_folder({"tokenizer_class": "LlamaTokenizer"})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=folder.name):
        load_tokenizer(folder, None)


def test_half_a_surrogate_pair_is_refused(make_folder: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="character 3"):
        loaded(make_folder(GENERIC)).encode("the\ud83c")


def test_a_very_long_text(make_folder: Callable[..., Path]) -> None:
    tokenizer = loaded(make_folder(GENERIC))
    text = "the quick brown fox, " * 20_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1, -1], r"prompt\[1\].*-1"),
        ([400], "400.*0 to 399"),
        ([2**31], "2147483648"),
        (["abc"], "abc"),
        ([1.0], r"1\.0"),
        ([True], "True"),
        ([[1, 2]], r"prompt\[0\]"),
        ([None], "None"),
        ([], "empty"),
        (5, "int"),
        ("12", "str"),
    ],
)
def test_prompt_ids_outside_the_vocabulary(ids: object, found: str) -> None:
    """C30"""
    with pytest.raises(UserError, match=found):
        check_prompt_ids(ids, 400)


def test_prompt_ids_inside_the_vocabulary() -> None:
    assert check_prompt_ids((0, np.int64(399)), 400) == [0, 399]


def test_end_ids_are_the_union(make_folder: Callable[..., Path]) -> None:
    """C11"""
    tokenizer = loaded(make_folder(GENERIC))
    assert stop_ids([7, 9], tokenizer) == {1, 7, 9}
    assert stop_ids(7, tokenizer) == {1, 7}
    assert stop_ids(None, tokenizer) == {1}
    assert stop_ids(0, None) == {0}
    assert stop_ids(None, loaded(make_folder())) == frozenset()
