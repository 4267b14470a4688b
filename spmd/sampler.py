"""From vocabulary-sharded logits to one token per sequence, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spmd import logprobs
from spmd.comm.errors import UserError
from spmd.comm.partition import Partition
from spmd.draw import draw_all, draw_kept
from spmd.filters import filters, find_cutoffs, gather
from spmd.logits import SampleRow, adjust_
from spmd.noise import stream_keys

if TYPE_CHECKING:
    from spmd.comm.group import Group

__all__ = ["SampleRow", "Sampled", "Sampler"]


@dataclass(frozen=True)
class Sampled:
    """The token of one row. `logprob` and `top` (token id, logprob; best first) are of the raw logits'
    softmax, and None and empty unless the request's `logprobs` asks for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Draws:
    """How each row of a batch is drawn: int64 keys of noise (see noise.py) and fp64 temperatures."""

    keys: np.ndarray
    temperatures: np.ndarray


class Sampler:
    """Chooses tokens from logits whose vocabulary is cut over the ranks of a tensor-parallel group.

    A token is a function of the row's logits, parameters, seed and position alone, never of the batch or
    of the number of ranks. Every choice is taken from gathered numbers, so all ranks return the same ids
    even if what they were given differs. Token ids of `sampleable` and above (embedding rows that have no
    text) are never chosen or reported, though the softmax of logprobs counts all rows of the vocabulary.

    Drawing is the Gumbel-max trick: the argmax of logit / temperature + noise, where the noise is a
    function of (seed, position, token id), needs one (value, id) from each rank.
    """

    def __init__(self, vocab: Partition, group: Group, sampleable: int | None = None) -> None:
        limit = vocab.total if sampleable is None else min(sampleable, vocab.total)
        self.vocab = vocab
        self.sampled = Partition(tuple(min(bound, limit) for bound in vocab.bounds))
        self.group = group
        self.start = vocab.start(group.rank)
        self.columns = self.sampled.count(group.rank)

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, rows: Sequence[SampleRow], winners: Tensor | None = None
    ) -> list[Sampled]:
        """One token per row of `logits` `[rows, local vocabulary]`; collective over the group.

        One all-gather serves the whole batch, and at least one more when any row has top_k, top_p or
        min_p. winners: fp64 `[rows, 4]`, where they have been found already (by `local_winners` of the GPU
        kernels, from `plain_draws`). `logits` is not changed. Raises `RuntimeError` naming the row whose
        logits hold NaN or infinity, and `UserError` for a row whose bans leave no token, on every rank.
        """
        self._check(logits, len(rows))
        if not rows:
            return []
        if winners is None:
            winners = self._local_winners(self._adjusted(logits[:, : self.columns], rows), rows)
        local = winners
        scored = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        tops = [rows[i].params.logprobs or 0 for i in scored]
        payload = local.flatten()
        if scored:
            index = torch.tensor(scored, device=logits.device)
            part = logprobs.local_part(
                logits[index], self.columns, self.start, local[index, 3].long(), max(tops)
            )
            payload = torch.cat([payload, part.flatten()])
        received = gather(payload, self.group)
        everyone = received[:, : local.numel()].reshape(self.group.size, len(rows), 4)
        ranks = _decide(everyone, rows)
        token_ids = everyone[ranks, np.arange(len(rows)), 3].astype(np.int64).tolist()
        result = [Sampled(token_id) for token_id in token_ids]
        if scored:
            parts = received[:, local.numel() :].reshape(self.group.size, len(scored), -1)
            merged = logprobs.merge(parts, [int(ranks[i]) for i in scored], tops, scored)
            for i, (logprob, best) in zip(scored, merged):
                result[i] = Sampled(token_ids[i], logprob, best)
        return result

    @torch.inference_mode()
    def score(self, logits: Tensor, token_ids: Sequence[int], top: int = 0) -> list[Sampled]:
        """Log-probabilities of given tokens (a prompt's, say) and of the `top` likeliest in their place.

        `logits` is `[rows, local vocabulary]`, `token_ids` the same on every rank, one a row and inside
        the vocabulary; collective over the group. Raises `RuntimeError` naming a row without numbers.
        """
        self._check(logits, len(token_ids))
        if not len(token_ids):
            return []
        targets = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        parts = gather(logprobs.local_part(logits, self.columns, self.start, targets, top), self.group)
        owners = [self.vocab.owner(token_id) for token_id in token_ids]
        merged = logprobs.merge(parts, owners, [top] * len(owners), range(len(owners)))
        return [Sampled(int(token), logprob, best) for token, (logprob, best) in zip(token_ids, merged)]

    def _check(self, logits: Tensor, rows: int) -> None:
        expected = (rows, self.vocab.count(self.group.rank))
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits: shape {tuple(logits.shape)}, expected {expected}")

    def _adjusted(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        changed = [i for i, row in enumerate(rows) if row.adjusts]
        if changed:
            logits = logits.to(torch.float32, copy=True)
            for i in changed:
                adjust_(logits[i], rows[i], self.start)
        return logits.float() if logits.dtype == torch.float64 else logits

    def _local_winners(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """`[rows, 4]` (float64): the largest logit here; logit, noise and id of the row's winner here."""
        device = logits.device
        result = torch.tensor([-torch.inf, -torch.inf, 0.0, -1.0], dtype=torch.float64, device=device)
        result = result.repeat(len(rows), 1)
        if self.columns:
            largest, index = logits.max(dim=-1)  # the first of equals, and NaN if there is one
            result[:, 0] = result[:, 1] = largest.double()
            result[:, 3] = (index + self.start).double()
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not drawn:
            return result
        filtered = [i for i in drawn if filters(rows[i].params)]
        if filtered:
            chosen, params = self._take(logits, filtered), [rows[i].params for i in filtered]
            cutoffs = find_cutoffs(chosen, params, self.sampled, self.group)
            if self.columns:
                result[filtered, 1:] = draw_kept(
                    chosen, *self._noise_of(result, rows, filtered), self.start, cutoffs
                )
        plain = [i for i in drawn if not filters(rows[i].params)]
        if plain and self.columns:
            chosen = self._take(logits, plain)
            result[plain, 1:] = draw_all(chosen, *self._noise_of(result, rows, plain), self.start)
        return result

    def _take(self, logits: Tensor, index: list[int]) -> Tensor:
        return logits if len(index) == logits.shape[0] else logits[torch.tensor(index, device=logits.device)]

    def _noise_of(
        self, winners: Tensor, rows: Sequence[SampleRow], index: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit here, temperature and noise key of the chosen rows."""
        temperatures = torch.tensor([rows[i].params.temperature for i in index], dtype=torch.float64)
        keys = stream_keys([rows[i].seed for i in index], [rows[i].position for i in index])
        device = winners.device
        return winners[index, 0], temperatures.to(device), keys.to(device)


def plain_draws(rows: Sequence[SampleRow]) -> Draws | None:
    """What choosing these rows' tokens depends on besides the logits; None when that is more than a key and a
    temperature (biases, penalties, bans, top_k, top_p or min_p in any row)."""
    if any(row.adjusts or filters(row.params) for row in rows):
        return None
    temperatures = np.array([row.params.temperature for row in rows], dtype=np.float64)
    keys = np.zeros(len(rows), dtype=np.int64)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        keys[drawn] = stream_keys([rows[i].seed for i in drawn], [rows[i].position for i in drawn]).numpy()
    return Draws(keys, temperatures)


def _decide(winners: np.ndarray, rows: Sequence[SampleRow]) -> np.ndarray:
    """The rank that has each row's winner, from `[ranks, rows, 4]`; equal scores go to the lowest ids."""
    best = winners[:, :, 0].max(axis=0)
    if not np.isfinite(best).all():
        _refuse(best, rows)
    if len(winners) == 1:
        return np.zeros(len(rows), dtype=np.int64)
    temperatures = np.array([row.params.temperature or 1.0 for row in rows])
    with np.errstate(over="ignore"):
        scores = (winners[:, :, 1] - best) / temperatures + winners[:, :, 2]
    return scores.argmax(axis=0)


def _refuse(best: np.ndarray, rows: Sequence[SampleRow]) -> None:
    i = int(np.flatnonzero(~np.isfinite(best))[0])
    if best[i] == -np.inf and (rows[i].params.logit_bias or len(rows[i].banned_ids)):
        raise UserError(
            f"row {i} of the batch: logit_bias and bans forbid every token, expected at least one allowed; "
            "remove some of the biases of -100, or min_tokens"
        )
    found = {np.inf: "infinity", -np.inf: "no finite number"}.get(best[i], "NaN")
    raise RuntimeError(f"row {i} of the batch: its logits hold {found}; the model's output is broken")
