"""Streamed text equals the decoded whole (C20)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from spmd.text.detokenizer import IncrementalDetokenizer
from spmd.text.tokenizer import Tokenizer


def streamed(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    prompt: Sequence[int] = (),
    skip: bool = True,
    sizes: random.Random | None = None,
) -> list[str]:
    """Deltas of `ids` pushed one by one, or in groups of random size, and the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    deltas, start = [], 0
    while start < len(ids):
        end = start + (1 if sizes is None else sizes.randrange(0, 4))
        deltas.append(detokenizer.push(ids[start:end]))
        start = end
    deltas.append(detokenizer.finish())
    assert detokenizer.text == "".join(deltas)
    return deltas


def test_a_character_of_three_tokens(smollm2: Tokenizer) -> None:
    assert [smollm2.decode([token_id]) for token_id in (10813, 230, 131)] == ["\ufffd"] * 3
    assert streamed(smollm2, [10813, 230, 131]) == ["", "", "🌶", ""]


def test_output_cut_inside_a_character(smollm2: Tokenizer) -> None:
    ids = [*smollm2.encode("hot "), 10813]
    deltas = streamed(smollm2, ids)
    assert "".join(deltas) == smollm2.decode(ids)
    assert deltas[-1] == smollm2.decode([10813])


def test_a_prompt_that_ends_inside_a_character_is_not_shown(smollm2: Tokenizer) -> None:
    prompt = [*smollm2.encode("some prompt text"), 10813]
    deltas = streamed(smollm2, [230, 131, *smollm2.encode(" ok")], prompt)
    assert "".join(deltas) == smollm2.decode([230, 131]) + " ok"


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids(smollm2: Tokenizer, skip: bool) -> None:
    """5 000 lists a case, half of them from the single-byte tokens."""
    generator = random.Random(int(skip))
    for n in range(5000):
        highest = 300 if n % 2 else smollm2.size + 100
        ids = [generator.randrange(highest) for _ in range(generator.randrange(1, 16))]
        assert "".join(streamed(smollm2, ids, skip=skip, sizes=generator)) == smollm2.decode(ids, skip)


def test_random_ids_of_a_small_byte_level_tokenizer(train_byte_level: Callable[..., Backend]) -> None:
    """With added tokens whose text is not in the byte alphabet."""
    backend = train_byte_level()
    backend.add_tokens([" two words ", "naïve", "中"])
    tokenizer = Tokenizer(backend)
    generator = random.Random(2)
    for n in range(3000):
        ids = [generator.randrange(tokenizer.size) for _ in range(generator.randrange(1, 12))]
        assert "".join(streamed(tokenizer, ids, skip=n % 2 == 0)) == tokenizer.decode(ids, n % 2 == 0)


def test_random_ids_of_a_sentencepiece_tokenizer(sentencepiece: Tokenizer) -> None:
    """Runs of byte tokens, whole characters and broken ones, between words."""
    generator = random.Random(3)
    for _ in range(5000):
        ids: list[int] = []
        for _ in range(generator.randrange(1, 10)):
            if generator.random() < 0.5:
                ids.append(generator.randrange(sentencepiece.size))
            else:
                data = generator.choice(["é", "🌶", "中", "a"]).encode()
                ids.extend(3 + byte for byte in data[: generator.choice([1, 2, 3, 4, 4])])
        assert "".join(streamed(sentencepiece, ids)) == sentencepiece.decode(ids)


def test_sentencepiece_space_after_a_prompt(sentencepiece: Tokenizer) -> None:
    """The space before a word is kept when the text goes on, and removed when it starts there."""
    ids = sentencepiece.encode("the quick", add_special_tokens=False)
    assert "".join(streamed(sentencepiece, ids)) == "the quick"
    assert "".join(streamed(sentencepiece, ids, prompt=[1])) == "the quick"  # only BOS before it
    assert "".join(streamed(sentencepiece, ids, prompt=[1, *ids])) == " the quick"


def test_a_long_run_of_byte_tokens_is_shown_before_it_ends(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in ("አማርኛ" * 20).encode()]
    deltas = streamed(sentencepiece, ids)
    assert "".join(deltas) == sentencepiece.decode(ids)
    assert deltas[-1] == ""
    assert max(map(len, deltas)) <= 22  # 64 bytes at first, then each character as it is complete


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(prepend_scheme="always"),
        decoders.BPEDecoder(suffix="</w>"),
        decoders.Fuse(),
    ],
)
def test_other_decoders(decoder: decoders.Decoder | None) -> None:
    words = ["the", "##ly", "▁fox", "ox</w>", "dog", ".", "▁", "'s"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="the"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    generator = random.Random(4)
    # BPEDecoder drops the suffix's space at the very end of a text only, which no stream can know.
    usable = [
        i for i, word in enumerate(words) if not isinstance(decoder, decoders.BPEDecoder) or "<" not in word
    ]
    for _ in range(500):
        ids = generator.choices(usable, k=generator.randrange(1, 8))
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_token_costs_the_same_late_in_a_text(sentencepiece: Tokenizer) -> None:
    """Includes text that never completes a character, which naive detokenizers decode again and again."""
    broken = [3 + 0x80] * 2000
    words = sentencepiece.encode("the quick fox", add_special_tokens=False) * 500
    for ids in (broken, words):
        detokenizer = IncrementalDetokenizer(sentencepiece)
        times = []
        for _ in range(12):
            start = time.process_time()
            for token_id in ids:
                detokenizer.push([token_id])
            times.append(time.process_time() - start)
        assert min(times[-4:]) < 4 * min(times[:4]) + 0.01
