"""Sampling options of one request, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from spmd.comm.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names follow the OpenAI API and vLLM.

    temperature 0 is greedy. top_k 0 (or -1) and top_p 1 and min_p 0 are off; they apply in that order,
    after temperature (as in `transformers`). repetition_penalty counts prompt and output once per id
    (CTRL, Keskar et al. 2019); presence_penalty and frequency_penalty count output tokens only (OpenAI).
    max_tokens None generates up to the context limit. logprobs None reports none, k reports the sampled
    token's and the k best; prompt_logprobs the same for the prompt's tokens. logit_bias is added to the
    logits; -100 forbids an id. Seeds count modulo 2**64.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise `UserError` naming the first option that is out of range. `vocab_size` bounds token ids."""
        _check_int("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0)
        _check_int("min_tokens", self.min_tokens, 0)
        _check_real("temperature", self.temperature, 0.0, math.inf)
        _check_int("top_k", self.top_k, -1)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, vocab_size)
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias: {self.logit_bias!r} is not a mapping of token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id, vocab_size)
            _check_real(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        _check_list("stop_token_ids", self.stop_token_ids, "token ids")
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id, vocab_size)
        _check_list("stop", self.stop, "strings")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UserError(f"stop: {text!r} is not a non-empty string")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name}: {value!r} is not an integer")
    if value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UserError(f"{name}: {value} is out of range, expected {expected}")


def _check_real(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserError(f"{name}: {value!r} is not a number")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer too long for a float
        finite = False
    if not finite or not (low <= value <= high) or (open_low and value == low):
        left = "greater than" if open_low else "at least"
        expected = f"{left} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
        raise UserError(f"{name}: {value} is out of range, expected {expected}")


def _check_list(name: str, value: object, of: str) -> None:
    if not isinstance(value, (tuple, list)):
        raise UserError(f"{name}: {value!r} is not a tuple or list of {of}")


def _check_token_id(name: str, value: object, vocab_size: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name}: {value!r} is not a token id (an integer)")
    if not 0 <= value < vocab_size:
        raise UserError(f"{name}: token id {value} is outside the vocabulary, expected 0 to {vocab_size - 1}")
