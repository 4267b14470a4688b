"""Rank 0's door: text, messages or ids come in, checked and tokenized requests come out."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spmd.comm.errors import UserError
from spmd.config import ModelConfig
from spmd.request import Request
from spmd.sampling_params import SamplingParams
from spmd.text.chat import ChatTemplate, chat_prompt_ids, load_chat_template
from spmd.text.tokenizer import Tokenizer, check_prompt_ids, stop_ids


class Frontend:
    """Turns what a user gives into `Request`s. Every mistake of the user's is a `UserError` from here."""

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        path: Path,
        gguf_metadata: dict[str, Any] | None,
        chat_template: str | None,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self._path = path
        self._gguf_metadata = gguf_metadata
        self._override = chat_template
        self._template: ChatTemplate | None = None
        self._end_ids = stop_ids(config.eos_token_ids, tokenizer)

    def from_text(
        self, request_id: str, prompt: str, params: SamplingParams, add_special_tokens: bool = True
    ) -> Request:
        """A request from plain text, tokenized as the model's own tokenizer does."""
        if self.tokenizer is None:
            raise UserError(f"{self._path} has no tokenizer: give the prompt as token ids")
        if not isinstance(prompt, str):
            raise UserError(f"prompt: {prompt!r} is neither text nor a list of token ids")
        ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return self._request(request_id, ids, params, prompt)

    def from_ids(self, request_id: str, ids: Sequence[int], params: SamplingParams) -> Request:
        """A request from token ids, taken as they are."""
        ids = check_prompt_ids(ids, self.config.vocab_size)
        return self._request(request_id, ids, params, None)

    def from_messages(
        self,
        request_id: str,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        **template_arguments: Any,
    ) -> Request:
        """A request from chat messages, put into words by the model's chat template."""
        if self.tokenizer is None:
            raise UserError(f"{self._path} has no tokenizer: chat needs one; give prompts as token ids")
        if self._template is None:
            self._template = load_chat_template(self._path, self._gguf_metadata, self._override)
        if self._template is None:
            raise UserError(
                f"{self._path} has no chat template: give one with --chat-template, or use raw prompts "
                "(--raw)"
            )
        ids = chat_prompt_ids(self._template, self.tokenizer, messages, **template_arguments)
        return self._request(request_id, ids, params, self.tokenizer.decode(ids, skip_special_tokens=False))

    def _request(
        self, request_id: str, ids: Sequence[int], params: SamplingParams, prompt: str | None
    ) -> Request:
        params.validate(self.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise UserError(f"stop: {self._path} has no tokenizer, so stop strings cannot be found")
        count = len(ids)
        if count == 0:
            raise UserError("prompt: it is empty, expected at least one token")
        room = self.max_model_len - count
        if (room < 1 and params.max_tokens != 0) or room < 0:
            raise UserError(
                f"prompt: it has {count} tokens, but prompt and output together have room for "
                f"{self.max_model_len}"
            )
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return Request(
            request_id=request_id,
            prompt_token_ids=np.asarray(ids, dtype=np.int64),
            params=replace(params, logit_bias=dict(params.logit_bias)),
            seed=seed % 2**64,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=end_ids,
            prompt=prompt,
        )
