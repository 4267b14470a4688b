"""top_k, top_p and min_p over a sharded vocabulary, each row's answer being one cutoff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spmd.comm.partition import Partition
from spmd.logits import ordered_top, sum_exp
from spmd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from spmd.comm.group import Group

# Two masses this close (relatively) count as equal: logits are float32 at best, so a set that reaches
# top_p "exactly" would otherwise be decided by rounding.
_SLACK = 1e-6
_FIRST_CANDIDATES = 128  # top-p sets are usually smaller; more are fetched when one is not
_GROWTH = 8


@dataclass(frozen=True)
class Cutoff:
    """Keep a token when its logit is above `logit`, or equal to it with an id of at most `token_id`."""

    logit: float = -math.inf
    token_id: float = math.inf


def gather(payload: Tensor, group: Group) -> np.ndarray:
    """All ranks' `payload` (the same shape everywhere), `[ranks, *shape]`, on the host of every rank."""
    everyone = group.all_gather(payload.reshape(1, -1).contiguous(), [1] * group.size, 0)
    return _on_host(everyone, group).numpy().reshape(group.size, *payload.shape)


def _on_host(x: Tensor, group: Group) -> Tensor:
    """x on the host; while the device gets there, the job's ledger shows what this rank waits for."""
    if not x.is_cuda:
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    group.wait_device(done)
    return host


def filters(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def find_cutoffs(
    logits: Tensor, params: Sequence[SamplingParams], vocab: Partition, group: Group
) -> list[Cutoff]:
    """What top_k, top_p and min_p keep of each row of `logits` `[rows, local columns]`.

    The filters apply in that order to the distribution at the row's temperature, as the warpers of
    `transformers` do: tokens tied with the k-th are kept; top_p keeps the smallest set that reaches its
    mass, ties by lowest id, at least one token; min_p compares with the likeliest token.

    Each rank contributes its largest logits and the mass of its columns. When a top-p set reaches below
    what was sent, more is fetched for the rows concerned, so the result is exact. Every rank computes
    it from the same gathered numbers.
    """
    rows = len(params)
    start = vocab.start(group.rank)
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=logits.device)
    if any(p.top_p < 1.0 and p.top_k <= 0 for p in params):
        top, mass = sum_exp(logits, temperatures)
    else:
        top = mass = logits.new_zeros(rows, dtype=torch.float64)  # nobody will ask
    cutoffs: list[Cutoff | None] = [None] * rows
    pending = list(range(rows))
    count = max(_first_count(p) for p in params)
    while pending:
        count = min(count, max(vocab.counts))
        index = torch.tensor(pending, device=logits.device)
        chosen = logits if len(pending) == rows else logits[index]
        values, token_ids = ordered_top(chosen, count, start)
        sent = torch.cat([top[index, None], mass[index, None], values, token_ids], dim=1)
        received = gather(sent, group)
        for row, parts in zip(pending, received.swapaxes(0, 1)):
            cutoffs[row] = _resolve(parts, params[row], count, vocab.counts)
        pending = [row for row in pending if cutoffs[row] is None]
        count *= _GROWTH
    return [cutoff for cutoff in cutoffs if cutoff is not None]


def _first_count(params: SamplingParams) -> int:
    if params.top_p < 1.0:
        return max(_FIRST_CANDIDATES, params.top_k + 8)  # a few more, for ties with the k-th
    return max(params.top_k, 1)


def _resolve(parts: np.ndarray, params: SamplingParams, count: int, columns: Sequence[int]) -> Cutoff | None:
    """One row's cutoff from `parts` `[ranks, 2 + 2 * count]`; None when more candidates are needed."""
    tops, masses = parts[:, 0], parts[:, 1]
    values, token_ids = parts[:, 2 : 2 + count], parts[:, 2 + count :]
    # What a rank did not send comes after its last candidate, so the merged list is complete up to the
    # first of those.
    cut = [rank for rank, held in enumerate(columns) if held > count]
    lasts = [(-values[rank, -1], token_ids[rank, -1]) for rank in cut]
    order = np.lexsort((token_ids.ravel(), -values.ravel()))
    value, token_id = values.ravel()[order], token_ids.ravel()[order]
    known = value > -np.inf
    if lasts:
        value_end, id_end = min(lasts)
        known &= (-value < value_end) | ((-value == value_end) & (token_id <= id_end))
    value, token_id = value[known], token_id[known]
    if not value.size or not np.isfinite(value[0]):
        return Cutoff()  # nothing to draw from, or no numbers: the draw reports it
    complete = not lasts or min(lasts)[0] == np.inf
    cutoff = Cutoff()
    best = value[0]

    if params.top_k > 0:
        # The k largest are known even where the list is not complete to the k-th's ties.
        largest = np.sort(values.ravel())[::-1]
        if params.top_k <= largest.size and largest[params.top_k - 1] > -np.inf:
            cutoff = Cutoff(float(largest[params.top_k - 1]))
    if params.top_p < 1.0:
        weight = _weights(value, best, params.temperature)
        if params.top_k > 0:
            if not complete and not value[-1] < cutoff.logit:
                return None
            inside = value >= cutoff.logit
            value, token_id, weight = value[inside], token_id[inside], weight[inside]
            total, complete = weight.sum(), True
        else:
            total = (masses * _weights(tops, best, params.temperature)).sum()
        above = np.concatenate([[0.0], np.cumsum(weight)])  # mass before each token, and after the last
        drop = total - above <= (1.0 - params.top_p) * (1.0 + _SLACK) * total
        drop[0] = False
        if drop.any():
            last = int(drop.argmax()) - 1
            if last < value.size - 1 or not complete:
                cutoff = Cutoff(float(value[last]), float(token_id[last]))
        elif not complete:
            return None
    if params.min_p > 0.0:
        floor = best + params.temperature * (math.log(params.min_p) - _SLACK)
        if floor > cutoff.logit:
            cutoff = Cutoff(float(floor))
    return cutoff


def _weights(values: np.ndarray, best: float, temperature: float) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return np.exp((values - best) / temperature)
