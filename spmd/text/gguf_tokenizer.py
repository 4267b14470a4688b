"""Tokenizer of a GGUF file, from its metadata alone.

The metadata names a model ("gpt2": byte-level BPE; "llama": SentencePiece BPE) and lists tokens, their types
and scores, and merges. Key names and defaults are llama.cpp's; pipelines are those of the models' own
`tokenizer.json` and of `transformers`, so that a model gives the same ids from a GGUF file as from its
folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from spmd.comm.errors import UserError
from spmd.text.gguf_pretokenizers import ADD_BOS_BY_DEFAULT, IGNORE_MERGES, NFC, splits_of
from spmd.text.tokenizer import Tokenizer


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, the values that need care."""

    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


# End-of-turn tokens that chat models emit and that a GGUF file doesn't always declare as eos, eot or eom.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")

_LLAMA_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}

_SPACE = "▁"


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that `tokenizer.ggml.*` describes.

    Raises `UserError` for a tokenizer model or pre-tokenizer this program doesn't know, or lists that don't
    fit.
    """
    model = metadata.get("tokenizer.ggml.model")
    build = _BUILDERS.get(model) if isinstance(model, str) else None
    if build is None:
        raise UserError(
            f"tokenizer.ggml.model: found {model!r}, expected one of {', '.join(map(repr, _BUILDERS))}; "
            "use the model's Hugging Face folder"
        )
    tokens = _tokens(metadata)
    try:
        backend = build(metadata, tokens)
    except UserError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception for merges that don't fit the vocabulary
        raise UserError(
            f"tokenizer.ggml: tokens and merges do not make a tokenizer ({error}); convert the file again"
        ) from error

    named_ids = _named_ids(metadata, len(tokens))
    special_tokens = {
        f"{short}_token": tokens[named_ids[name]]
        for name, short in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
        if name in named_ids
    }
    _add_tokens(backend, tokens, _types(metadata), special_tokens)
    _add_post_processor(backend, metadata, special_tokens)
    return Tokenizer(backend, special_tokens, _end_ids(metadata, tokens, named_ids))


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, (list, tuple)) or not tokens:
        raise UserError("tokenizer.ggml.tokens: missing or empty; use a GGUF file that holds its tokenizer")
    types = _types(metadata)
    if types and len(types) != len(tokens):
        raise UserError(
            f"tokenizer.ggml.token_type: {len(types)} entries, "
            f"expected {len(tokens)} as in tokenizer.ggml.tokens"
        )
    return list(tokens)


def _types(metadata: Mapping[str, Any]) -> list[int]:
    return [int(value) for value in metadata.get("tokenizer.ggml.token_type") or ()]


def _named_ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    defaults = _LLAMA_DEFAULT_IDS if metadata["tokenizer.ggml.model"] == "llama" else {}
    ids = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", defaults.get(name))
        # Converters write 2**32 - 1 for "none".
        if token_id is not None and 0 <= int(token_id) < count:
            ids[name] = int(token_id)
    return ids


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    splits = splits_of(pre)
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in IGNORE_MERGES))
    if pre in NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)), use_regex=False
            ),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    architecture = str(metadata.get("general.architecture", ""))
    is_gemma = architecture.startswith("gemma")
    types = _types(metadata) or [1] * len(tokens)
    if is_gemma:
        # Gemma files spell runs of spaces as user-defined tokens; in the vocabulary they are merges of the
        # space mark.
        for index, token in enumerate(tokens):
            if len(token) > 1 and not token.strip(" "):
                tokens[index] = _SPACE * len(token)
                types[index] = 1
    vocab = {token: index for index, token in enumerate(tokens)}
    if metadata.get("tokenizer.ggml.merges"):
        merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        # Gemma's scores don't follow its merge order, the order of its tokens does.
        scores = [] if is_gemma else list(metadata.get("tokenizer.ggml.scores") or ())
        if scores and len(scores) != len(tokens):
            raise UserError(
                f"tokenizer.ggml.scores: {len(scores)} entries, "
                f"expected {len(tokens)} as in tokenizer.ggml.tokens"
            )
        merges = _merges_by_score(vocab, scores or [-index for index in range(len(tokens))], types)
    unknown_id = int(metadata.get("tokenizer.ggml.unknown_token_id", _LLAMA_DEFAULT_IDS["unknown"]))
    unknown = tokens[unknown_id] if 0 <= unknown_id < len(tokens) else None
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    add_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma))
    if add_prefix and architecture == "phi3":
        # Phi-3's own tokenizer.json marks the prefix in a normalizer: a text that starts with a space gets
        # one more.
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
    else:
        scheme = "first" if add_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme=scheme, split=False
        )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges a SentencePiece BPE vocabulary implies, best first.

    Every way to make a token out of two others is a merge, ranked by the score of the token it makes
    (as in `transformers.tokenization_utils_base.generate_merges`).
    """
    whole = (_TokenType.CONTROL, _TokenType.USER_DEFINED, _TokenType.BYTE)
    ranked = []
    for token, index in vocab.items():
        if types[index] in whole:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            left_id, right_id = vocab.get(left), vocab.get(right)
            if left_id is not None and right_id is not None:
                ranked.append(
                    (-scores[index], -len(left), -len(right), index, left_id, right_id, left, right)
                )
    ranked.sort()
    return [(entry[-2], entry[-1]) for entry in ranked]


_BUILDERS: Mapping[str, Callable[[Mapping[str, Any], list[str]], Backend]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _add_tokens(
    backend: Backend, tokens: Sequence[str], types: Sequence[int], special_tokens: Mapping[str, str]
) -> None:
    control = [tokens[index] for index, kind in enumerate(types) if kind == _TokenType.CONTROL]
    user_defined = [tokens[index] for index, kind in enumerate(types) if kind == _TokenType.USER_DEFINED]
    special = dict.fromkeys([*control, *special_tokens.values()])
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special if text])
    backend.add_tokens(
        [
            AddedToken(text, normalized=False, special=False)
            for text in user_defined
            if text
            and text not in special
            and set(text) != {_SPACE}
            and backend.token_to_id(text) is not None
        ]
    )


def _add_post_processor(
    backend: Backend, metadata: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    default_bos = (
        metadata["tokenizer.ggml.model"] == "llama"
        or metadata.get("tokenizer.ggml.pre") in ADD_BOS_BY_DEFAULT
    )
    bos = special_tokens.get("bos_token")
    eos = special_tokens.get("eos_token")
    template = ["$A"]
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", default_bos):
        template.insert(0, bos)
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        template.append(eos)
    added = [(text, backend.token_to_id(text)) for text in dict.fromkeys(template) if text != "$A"]
    if added:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=added)


def _end_ids(
    metadata: Mapping[str, Any], tokens: Sequence[str], named_ids: Mapping[str, int]
) -> frozenset[int]:
    ends = {named_ids[name] for name in ("eos", "eot", "eom") if name in named_ids}
    types = _types(metadata)
    control = {tokens[index]: index for index, kind in enumerate(types) if kind == _TokenType.CONTROL}
    for text in _END_OF_TURN:
        # In the harmony format <|end|> closes one of several messages of a turn; <|return|> and <|call|> end
        # it.
        if text in control and not (text == "<|end|>" and "<|return|>" in control):
            ends.add(control[text])
    return frozenset(ends)
