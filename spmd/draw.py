"""The winner among a rank's own columns: the largest logit, or a draw by Gumbel noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.filters import Cutoff
from spmd.logits import row_tiles, tile_elements
from spmd.noise import gumbel


def draw_all(logits: Tensor, best: Tensor, temperatures: Tensor, keys: Tensor, start: int) -> Tensor:
    """Draw from the softmax of each row of `logits / temperature`, by the Gumbel-max trick.

    Returns `[rows, 3]` (float64): logit, noise and token id of the largest `logit / temperature + noise`
    among these columns, (-inf, 0, -1) if there is none. `best` `[rows]` is the row's largest logit here.
    """
    rows, columns = logits.shape
    device = logits.device
    counters = torch.arange(start + 1, start + columns + 1, device=device)
    width = min(columns, tile_elements(device))
    top = best.new_full((rows,), -torch.inf)
    column = torch.zeros(rows, dtype=torch.int64, device=device)
    for tile in row_tiles(logits, width):
        for left in range(0, columns, width):
            part = slice(left, left + width)
            scores = logits[tile, part].double().sub_(best[tile, None]).div_(temperatures[tile, None])
            scores.add_(gumbel(counters[None, part], keys[tile, None]))
            score, index = scores.max(dim=-1)
            higher = score > top[tile]
            top[tile] = torch.where(higher, score, top[tile])
            column[tile] = torch.where(higher, index + left, column[tile])
    row = torch.arange(rows, device=device)
    noise = gumbel(counters[column], keys)
    result = torch.stack([logits[row, column].double(), noise, (column + start).double()], dim=1)
    result[top == -torch.inf] = result.new_tensor([-torch.inf, 0.0, -1.0])
    return result


def draw_kept(
    logits: Tensor, best: Tensor, temperatures: Tensor, keys: Tensor, start: int, cutoffs: Sequence[Cutoff]
) -> Tensor:
    """As `draw_all`, among the tokens that each row's cutoff keeps."""
    rows, device = logits.shape[0], logits.device
    floor = torch.tensor([cutoff.logit for cutoff in cutoffs], dtype=torch.float32, device=device)
    last = torch.tensor([cutoff.token_id for cutoff in cutoffs], dtype=torch.float64, device=device)
    row, column = (logits >= floor[:, None]).nonzero(as_tuple=True)
    tied_out = (logits[row, column] == floor[row]) & (column + start > last[row])
    row, column = row[~tied_out], column[~tied_out]
    value = logits[row, column].double()
    noise = gumbel(column + (start + 1), keys[row])
    score = (value - best[row]).div_(temperatures[row]).add_(noise)
    top = score.new_full((rows,), -torch.inf).scatter_reduce_(0, row, score, "amax")
    (won,) = (score == top[row]).nonzero(as_tuple=True)
    first = won.new_full((rows,), row.shape[0]).scatter_reduce_(0, row[won], won, "amin")
    found = first < row.shape[0]
    winner = first[found]
    result = score.new_tensor([-torch.inf, 0.0, -1.0]).repeat(rows, 1)
    result[found] = torch.stack([value[winner], noise[winner], (column[winner] + start).double()], dim=1)
    return result
