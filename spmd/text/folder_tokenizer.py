"""Tokenizer of a Hugging Face folder, tokenizing as `transformers.AutoTokenizer` does.

`tokenizer.json` is read directly when `AutoTokenizer` would take it as it stands. For tokenizer classes that
rebuild their pipeline from the vocabulary (`LlamaTokenizer`, `GPT2Tokenizer`, `Qwen2Tokenizer`, ... since
transformers 5) and for older file formats, `AutoTokenizer` itself builds it, once, and its backend is used
from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from spmd.comm.errors import UserError
from spmd.text.tokenizer import Tokenizer

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Classes that leave tokenizer.json as it is.
_VERBATIM_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")

# Model types whose tokenizer class transformers overrides with one of its own, whatever the folder says.
_OVERRIDDEN_MODEL_TYPES = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2")


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """Tokenizer of a folder, None when there are no tokenizer files.

    Raises `UserError` naming the file that can't be read.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    tokenizer_config = read_json_object(folder / "tokenizer_config.json")
    model_config = read_json_object(folder / "config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
        if _taken_verbatim(tokenizer_config, model_config):
            return _with_config(backend, folder, tokenizer_config)
    return _through_transformers(folder)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty when there is no such file. `UserError` when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read as JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # `tokenizers` raises bare Exception for a file it can't parse
        raise UserError(f"{path}: can't be read as a tokenizer ({error}); download the file again") from error


def _taken_verbatim(tokenizer_config: Mapping[str, Any], model_config: Mapping[str, Any]) -> bool:
    model_type = model_config.get("model_type")
    if "auto_map" in tokenizer_config or model_type in _OVERRIDDEN_MODEL_TYPES:
        return False
    name = tokenizer_config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if name is None:
        # Without a class AutoTokenizer goes by the model type; only these have no class of their own.
        return model_type in (None, "", "llama")
    return isinstance(name, str) and name.removesuffix("Fast") in _VERBATIM_CLASSES


def _with_config(backend: Backend, folder: Path, tokenizer_config: Mapping[str, Any]) -> Tokenizer:
    """Add the tokens that only the configuration files declare, as `PreTrainedTokenizerBase` does."""
    config = dict(tokenizer_config)
    declared: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in config:
        for token_id, fields in config["added_tokens_decoder"].items():
            declared[int(token_id)] = _added_token(fields)
    else:
        # Folders written before transformers 4.34 keep this in two files of their own.
        config.update(read_json_object(folder / "special_tokens_map.json"))
        special_texts = {_text(config[name]) for name in _NAMED_TOKENS if config.get(name)}
        special_texts.update(_text(token) for token in _extra_tokens(config))
        for text, token_id in read_json_object(folder / "added_tokens.json").items():
            special = text in special_texts
            declared[token_id] = AddedToken(text, normalized=not special, special=special)
        declared.update(backend.get_added_tokens_decoder())

    padding = backend.padding
    if padding is not None:
        config.setdefault("pad_token", padding["pad_token"])
    others = [name for name in config if name.endswith("_token") and name not in _NAMED_TOKENS]
    named = {
        name: config[name] for name in (*_NAMED_TOKENS, *others) if isinstance(config.get(name), (str, dict))
    }

    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    additions = [token for _, token in sorted(declared.items()) if repr(token) not in present]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known.update(token.content for token in additions)
    for value in (*named.values(), *_extra_tokens(config)):
        if _text(value) not in known:
            token = _added_token(value)
            token.special = True
            additions.append(token)
            known.add(token.content)
    backend.add_tokens(additions)
    special_tokens = {name: _text(value) for name, value in named.items()}
    return Tokenizer(
        backend, special_tokens, split_special_tokens=bool(config.get("split_special_tokens", False))
    )


def _extra_tokens(config: Mapping[str, Any]) -> list[Any]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return list(extra.values()) if isinstance(extra, dict) else list(extra)


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _added_token(token: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(**{key: value for key, value in token.items() if key not in ("__type", "id")})


def _through_transformers(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # every tokenizer class has its own ways to reject its files
        raise UserError(
            f"{folder}: transformers can't build the tokenizer ({error}); check the folder's tokenizer files"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise UserError(
            f"{folder}: tokenizer class {type(loaded).__name__} has no fast form; "
            "save the tokenizer with a tokenizer.json"
        )
    return Tokenizer(
        backend, loaded.special_tokens_map, split_special_tokens=bool(loaded.split_special_tokens)
    )
