"""The tokenizer: text to ids and back, the same on every rank.

Rank 0 reads the files (`load_tokenizer`); the others receive `Tokenizer.to_state()`, a picklable dict, and
parse it only when they first need text.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from spmd.comm.errors import UserError


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's special tokens.

    `special_tokens` maps names as chat templates use them ("bos_token", "eos_token", ...) to their text.
    `eos_token_ids` are the ids that end a generation according to the tokenizer's own files.
    """

    def __init__(
        self,
        backend: Backend | str,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] | None = None,
        split_special_tokens: bool = False,
    ) -> None:
        """`backend` is a built tokenizer, or its JSON text, which is parsed at first use.

        `eos_token_ids` None means the id of `special_tokens["eos_token"]`, if there is one.
        `split_special_tokens` encodes special tokens in text as ordinary text.
        """
        self._source = backend
        self.special_tokens = dict(special_tokens or {})
        self._split_special_tokens = split_special_tokens
        self._eos_token_ids = None if eos_token_ids is None else frozenset(eos_token_ids)

    def to_state(self) -> dict[str, Any]:
        """Everything another rank needs to build the same tokenizer, as plain picklable values."""
        return {
            "json": self._source if isinstance(self._source, str) else self._source.to_str(),
            "special_tokens": self.special_tokens,
            "eos_token_ids": sorted(self.eos_token_ids),
            "split_special_tokens": self._split_special_tokens,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tokenizer:
        return cls(
            state["json"], state["special_tokens"], state["eos_token_ids"], state["split_special_tokens"]
        )

    @cached_property
    def backend(self) -> Backend:
        backend = Backend.from_str(self._source) if isinstance(self._source, str) else self._source
        # A tokenizer.json may ask for padding or truncation of training batches; a prompt gets neither.
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = self._split_special_tokens
        return backend

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        if self._eos_token_ids is not None:
            return self._eos_token_ids
        eos_id = None if self.eos_token is None else self.token_to_id(self.eos_token)
        return frozenset() if eos_id is None else frozenset({eos_id})

    @cached_property
    def size(self) -> int:
        """Highest token id plus one. Rows of the embedding from here on have no text."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def id_is_special(self, token_id: int) -> bool:
        """Whether `decode(..., skip_special_tokens=True)` leaves this id out."""
        token = self.id_to_token(token_id)
        return token is not None and self.text_is_special(token)

    def text_is_special(self, token: str) -> bool:
        return token in self._special_texts

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, None for an id without one."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @cached_property
    def decoder_steps(self) -> list[dict[str, Any]]:
        """The stages of the decoder, as in tokenizer.json; none when tokens are joined by spaces."""
        decoder = self.backend.decoder
        if decoder is None:
            return []
        stages = json.loads(decoder.__getstate__())
        return stages["decoders"] if stages["type"] == "Sequence" else [stages]

    def join_tokens(self, tokens: list[str]) -> str:
        """Text of a list of vocabulary entries."""
        decoder = self.backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, equal to `transformers`' `tokenizer(text).input_ids`.

        Raises `UserError` when the text holds half of a surrogate pair, which no encoding can carry.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            if not isinstance(text, str):
                raise
            raise UserError(
                f"prompt: the text is not valid Unicode ({_surrogate(text)}); send well-formed text"
            ) from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a list of ids. Ids without a token decode to nothing."""
        known = [token_id for token_id in ids if 0 <= token_id < 2**32]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)


def _surrogate(text: str) -> str:
    position = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
    return "unpaired surrogate" if position is None else f"unpaired surrogate at character {position}"


def check_prompt_ids(prompt_ids: object, vocab_size: int) -> list[int]:
    """A prompt given as token ids, checked: a non-empty flat list of integers in [0, vocab_size).

    Raises `UserError` naming the first bad entry.
    """
    if isinstance(prompt_ids, (str, bytes, Mapping)) or not isinstance(prompt_ids, Iterable):
        raise UserError(f"prompt: expected a list of token ids, found {type(prompt_ids).__name__}")
    checked = []
    for position, value in enumerate(prompt_ids):
        try:
            token_id = operator.index(value)
        except TypeError:
            token_id = None
        if token_id is None or isinstance(value, bool):
            raise UserError(f"prompt[{position}]: {value!r} is not a token id (an integer)")
        if not 0 <= token_id < vocab_size:
            raise UserError(
                f"prompt[{position}]: token id {token_id} is outside the vocabulary, "
                f"expected 0 to {vocab_size - 1}"
            )
        checked.append(token_id)
    if not checked:
        raise UserError("prompt: the list of token ids is empty, expected at least one")
    return checked


def load_tokenizer(path: Path, gguf_metadata: Mapping[str, Any] | None = None) -> Tokenizer | None:
    """Tokenizer of a checkpoint: of a GGUF file's metadata, or else of the folder `path`.

    Returns None for a folder that holds no tokenizer files. Raises `UserError` naming the file that can't be
    read.
    """
    if gguf_metadata is not None:
        from spmd.text.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(gguf_metadata)
    from spmd.text.folder_tokenizer import tokenizer_from_folder

    return tokenizer_from_folder(path)


def stop_ids(config_eos: int | Iterable[int] | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that ends a generation: the model files' (one, several or none) and the tokenizer's."""
    if config_eos is None:
        config_eos = ()
    elif isinstance(config_eos, int):
        config_eos = (config_eos,)
    return frozenset(config_eos) | (frozenset() if tokenizer is None else tokenizer.eos_token_ids)
