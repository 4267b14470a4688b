"""From every rank's candidates to one token a row, without leaving the device."""

from __future__ import annotations

import torch
from torch import Tensor


def decide(winners: Tensor, temperatures: Tensor) -> Tensor:
    """Token ids int64 `[rows]` from `winners` fp64 `[ranks, rows, 4]` (see `local_winners`) and
    `temperatures` fp64 `[rows]`, 0 where the row is greedy.

    The rule of `spmd.sampler`: largest score, and of equal ones the lowest rank's. -1 in a row whose
    logits hold NaN or infinity, or nothing that may be chosen; whoever reads the ids says so.
    """
    best = winners[:, :, 0].amax(0)  # NaN if there is one
    divisors = torch.where(temperatures == 0, torch.ones_like(temperatures), temperatures)
    scores = (winners[:, :, 1] - best) / divisors + winners[:, :, 2]
    ranks = scores.argmax(0)  # the first of equals
    token_ids = winners[:, :, 3].gather(0, ranks[None])[0].long()
    return torch.where(best.isfinite(), token_ids, -1)
