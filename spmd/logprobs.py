"""Log-probabilities over a sharded vocabulary: what each rank contributes, and how it is put together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spmd.logits import ordered_top, sum_exp


def local_part(logits: Tensor, sampleable: int, start: int, token_ids: Tensor, top: int) -> Tensor:
    """A rank's share for `merge`, `[rows, 3 + 2 * top]` (float64), from its raw `logits` `[rows, columns]`.

    It holds the logit of `token_ids` `[rows]` (-inf where that is not on this rank), the maximum and the
    sum of exponentials over all columns, and the `top` largest among the first `sampleable` columns.
    """
    rows, columns = logits.shape
    index = token_ids - start
    here = (index >= 0) & (index < columns)
    chosen = torch.full((rows,), -torch.inf, dtype=torch.float64, device=logits.device)
    chosen[here] = logits[here, index[here]].double()
    largest, total = sum_exp(logits, torch.ones_like(chosen))
    values, ids = ordered_top(logits[:, :sampleable], top, start)
    return torch.cat([torch.stack([chosen, largest, total], dim=1), values, ids], dim=1)


def merge(
    parts: np.ndarray, owners: Sequence[int], tops: Sequence[int], names: Sequence[int]
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Each row's log-probability of its token and its `tops[row]` likeliest (token id, logprob), best first.

    `parts` `[ranks, rows, 3 + 2 * top]` are all ranks' `local_part`, and `owners[row]` is the rank whose
    token counts. Raises `RuntimeError` with the row's name where the logits are not numbers.
    """
    width = (parts.shape[2] - 3) // 2
    largest, total = parts[:, :, 1], parts[:, :, 2]
    with np.errstate(invalid="ignore", divide="ignore"):
        peak = largest.max(axis=0)
        normalizer = peak + np.log((total * np.exp(largest - peak)).sum(axis=0))
    results = []
    for row, (owner, top, name) in enumerate(zip(owners, tops, names)):
        if not np.isfinite(normalizer[row]):
            raise RuntimeError(f"row {name}: the softmax of its logits is {normalizer[row]}, not a number")
        values = parts[:, row, 3 : 3 + width].ravel()
        ids = parts[:, row, 3 + width :].ravel()
        order = np.lexsort((ids, -values))[:top]
        best = tuple((int(ids[i]), float(values[i] - normalizer[row])) for i in order if values[i] > -np.inf)
        results.append((float(parts[owner, row, 0] - normalizer[row]), best))
    return results
