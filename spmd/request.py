"""A request as it crosses ranks, and a sequence as the scheduler moves it along."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spmd.block_pool import BLOCK_SIZE, block_key
from spmd.outputs import CompletionOutput, RequestOutput, TokenLogprob
from spmd.sampling_params import SamplingParams
from spmd.text.detokenizer import IncrementalDetokenizer
from spmd.text.stop import StopStrings
from spmd.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt with its options, checked and tokenized on rank 0 and the same on all ranks.

    seed is resolved (drawn on rank 0 if the user gave none), so that sampling is a pure function.
    stop_ids are all ids that end it, those of the model included unless ignore_eos.
    """

    request_id: str
    prompt_token_ids: np.ndarray  # int64 [prompt tokens]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    prompt: str | None = None


@dataclass(eq=False)
class Sequence:
    """One of the `n` continuations of a request.

    num_computed: tokens whose keys and values are in the cache. blocks: its block table. cached_tokens:
    how many the prefix cache had when it first started. prompt_scores: logprobs of prompt positions 1...
    """

    request: Request
    index: int
    seed: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    preemptions: int = 0
    cached_tokens: int | None = None
    prompt_scores: dict[int, TokenLogprob] = field(default_factory=dict)
    _block_keys: list[bytes] = field(default_factory=list)
    long_rope: bool = False  # cached keys were computed for a length beyond the rotary switch

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Ids of positions start..stop, prompt then output."""
        prompt = self.request.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        output = np.asarray(self.output_ids[max(0, start - len(prompt)) : stop - len(prompt)], dtype=np.int64)
        return np.concatenate([prompt[start:], output]) if start < len(prompt) else output

    def token_at(self, position: int) -> int:
        """The id at one position."""
        prompt = self.request.prompt_token_ids
        return int(prompt[position]) if position < len(prompt) else self.output_ids[position - len(prompt)]

    @property
    def wants_prompt_scores(self) -> bool:
        """The prompt's logprobs are asked for (of the first continuation only) and not all there."""
        wanted = self.request.params.prompt_logprobs is not None and self.index == 0
        return wanted and len(self.prompt_scores) < len(self.request.prompt_token_ids) - 1

    def block_keys(self, count: int) -> list[bytes]:
        """Prefix-cache keys of the first `count` blocks, all of which must be full."""
        keys = self._block_keys
        while len(keys) < count:
            start = len(keys) * BLOCK_SIZE
            keys.append(block_key(keys[-1] if keys else b"", self.token_ids(start, start + BLOCK_SIZE)))
        return keys[:count]

    def append(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Take a sampled token and see whether an end id or the length limit finishes the sequence."""
        self.output_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token_id in self.request.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif len(self.output_ids) >= self.request.max_tokens:
            self.finish_reason = "length"


class SequenceText:
    """Turns a sequence's tokens into text as they come, and finds stop strings in it."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self.text = ""
        self._taken = 0
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_ids=sequence.request.prompt_token_ids[-8:].tolist(),
            skip_special_tokens=params.skip_special_tokens,
        )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)

    def update(self) -> str:
        """Take the tokens that are new and return the text that can be shown.

        Sets the sequence's finish reason when a stop string is complete. An end id itself has no text.
        """
        sequence = self.sequence
        new = sequence.output_ids[self._taken :]
        self._taken += len(new)
        if new and sequence.stop_reason == new[-1] and sequence.finish_reason == "stop":
            new = new[:-1]
        text = self._detokenizer.push(new)
        if sequence.finish_reason is not None:
            text += self._detokenizer.finish()
        if len(sequence.output_ids) <= sequence.request.params.min_tokens:
            shown = text  # stop strings count only after min_tokens, as end ids do
        else:
            shown = self._stops.push(text)
        if self._stops.matched is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", self._stops.matched
        elif sequence.finish_reason is not None:
            shown += self._stops.finish()
        self.text += shown
        return shown


def to_output(request: Request, sequences: list[Sequence], texts: list[str] | None) -> RequestOutput:
    """The finished request as its user sees it."""
    scores = sequences[0].prompt_scores
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids.tolist(),
        outputs=[
            CompletionOutput(
                index=sequence.index,
                token_ids=list(sequence.output_ids),
                text=texts[sequence.index] if texts is not None else None,
                finish_reason=sequence.finish_reason or "length",
                stop_reason=sequence.stop_reason,
                logprobs=list(sequence.logprobs) if request.params.logprobs is not None else None,
            )
            for sequence in sequences
        ],
        prompt_logprobs=(
            [None, *(scores[position] for position in sorted(scores))]
            if request.params.prompt_logprobs is not None
            else None
        ),
        cached_tokens=sequences[0].cached_tokens or 0,
    )
