"""What a finished request looks like, to the `LLM` API, to batch files and to a server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probabilities of one generated position, from the model's own distribution:
    before temperature, penalties, logit bias and filters.

    `top` holds the (token id, logprob) pairs of the most likely tokens, best first; as many as the
    request asked for. The sampled token is not added to it when it is not among them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class CompletionOutput:
    """One generated sequence of a request."""

    index: int
    token_ids: list[int]
    text: str | None  # None when the model has no tokenizer
    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    logprobs: list[TokenLogprob] | None = None


@dataclass
class RequestOutput:
    """Result of one request: its prompt and `n` completions.

    prompt_logprobs, if asked for, has one entry a prompt token, the first None. cached_tokens: prompt tokens
    whose keys and values were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)
