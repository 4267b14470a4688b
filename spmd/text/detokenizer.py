"""Ids to text as they are generated: a character that several tokens spell appears once it is complete.

The deltas joined are `tokenizer.decode` of the whole list, and a token costs the same however long the output
is.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from spmd.text.tokenizer import Tokenizer

# A run of SentencePiece byte tokens is text or garbage as a whole (see _SentencePiece), but one this long
# that has been text so far is shown without waiting for its end: scripts outside the vocabulary are written
# in nothing else.
_LONGEST_HELD_RUN = 64

_REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Decoder(Protocol):
    def push(self, token: str) -> str:
        """Text that is settled now that `token` follows."""
        ...

    def flush(self) -> str:
        """Text still held, as it stands when nothing follows."""
        ...


class IncrementalDetokenizer:
    """Text of one sequence, grown by the ids pushed into it.

    `prompt_ids` are never part of the text. They only tell that it continues something, so that the space in
    front of a SentencePiece word is kept. A prompt that ends inside a character contributes nothing to it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        previous = next(
            (token for i in reversed(prompt_ids) if (token := self._visible(i)) is not None), None
        )
        self._decoder = _decoder_for(tokenizer, previous)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text they settle, "" when a character is still incomplete."""
        tokens = (self._visible(token_id) for token_id in ids)
        return self._emit("".join([self._decoder.push(token) for token in tokens if token is not None]))

    def finish(self) -> str:
        """Return what was held back; a character left incomplete becomes U+FFFD, as in `tokenizer.decode`."""
        return self._emit(self._decoder.flush())

    def _visible(self, token_id: int) -> str | None:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or (self._skip_special_tokens and self._tokenizer.text_is_special(token)):
            return None
        return token

    def _emit(self, delta: str) -> str:
        if delta:
            self._parts.append(delta)
        return delta


def _decoder_for(tokenizer: Tokenizer, previous: str | None) -> _Decoder:
    """The decoder to go on with after the token `previous`; None starts a text."""
    steps = tokenizer.decoder_steps
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevel()
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and "String" in steps[0]["pattern"]:
        if kinds[3:] == []:
            return _SentencePiece(steps[0]["pattern"]["String"], steps[0]["content"], None)
        if kinds[3:] == ["Strip"] and (steps[3]["start"], steps[3]["stop"]) == (1, 0):
            strip = steps[3]["content"] if previous is None else None
            return _SentencePiece(steps[0]["pattern"]["String"], steps[0]["content"], strip)
    return _Pairwise(tokenizer, previous)


class _ByteLevel:
    """GPT-2's byte alphabet: every token is a string of bytes, the text is the UTF-8 they spell."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        try:
            data = bytes([_BYTES_OF[char] for char in token])
        except KeyError:  # an added token, in plain text
            data = token.encode("utf-8")
        return self._utf8.decode(data)

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES_OF = _byte_alphabet()


class _SentencePiece:
    """Words with a mark for the space before them, and byte tokens for what has no word.

    `tokenizers` reads a run of byte tokens as UTF-8, or, when the run as a whole is not valid, as one U+FFFD
    a byte. So a run is held until it ends, becomes invalid, or is `_LONGEST_HELD_RUN` bytes long.
    """

    def __init__(self, mark: str, replacement: str, strip: str | None) -> None:
        """`strip` is the character removed once from the very start of the text, None when nothing is."""
        self._mark = mark
        self._replacement = replacement
        self._strip = strip
        self._run = b""
        self._invalid = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._held = ""
        self._showing = False

    def push(self, token: str) -> str:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is None:
            return self._end_run() + self._stripped(token.replace(self._mark, self._replacement))
        return self._stripped(self._push_byte(int(byte[1], 16)))

    def flush(self) -> str:
        return self._end_run()

    def _push_byte(self, byte: int) -> str:
        if self._invalid:
            return _REPLACEMENT
        self._run += bytes([byte])
        try:
            self._held += self._utf8.decode(self._run[-1:])
        except UnicodeDecodeError:
            self._invalid = True
            return self._spoiled()
        if self._showing or len(self._run) >= _LONGEST_HELD_RUN:
            self._showing = True
            self._run = self._utf8.getstate()[0]
            text, self._held = self._held, ""
            return text
        return ""

    def _spoiled(self) -> str:
        """The whole run is not text: as many U+FFFD as there are bytes that have not been shown."""
        count, self._run, self._held = len(self._run), b"", ""
        return _REPLACEMENT * count

    def _end_run(self) -> str:
        complete = not self._utf8.getstate()[0]
        text = self._held if complete and not self._invalid else self._spoiled()
        self._run, self._held, self._invalid, self._showing = b"", "", False, False
        self._utf8.reset()
        return self._stripped(text)

    def _stripped(self, text: str) -> str:
        if self._strip is None or not text:
            return text
        strip, self._strip = self._strip, None
        return text.removeprefix(strip)


class _Pairwise:
    """Any other decoder: a token's text is what it adds after the token before it."""

    def __init__(self, tokenizer: Tokenizer, previous: str | None) -> None:
        self._tokenizer = tokenizer
        self._previous = previous

    def push(self, token: str) -> str:
        previous, self._previous = self._previous, token
        if previous is None:
            return self._tokenizer.join_tokens([token])
        return self._tokenizer.join_tokens([previous, token])[len(self._tokenizer.join_tokens([previous])) :]

    def flush(self) -> str:
        return ""
