"""What is done to a rank's columns of the logits before anything is drawn or reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmd.sampling_params import SamplingParams

TokenIds = Sequence[int] | np.ndarray

BAN = -100.0  # a logit_bias at or below this forbids the token (OpenAI API)


@dataclass
class SampleRow:
    """One row of logits: a sequence that is to get its next token.

    `seed` is resolved (never None) and `position` counts the tokens generated so far for this sequence;
    together they choose the noise. `banned_ids` are never sampled (end ids below `min_tokens`, say).
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: TokenIds
    output_ids: TokenIds
    banned_ids: Sequence[int] = ()

    @property
    def adjusts(self) -> bool:
        params = self.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or len(self.banned_ids)
        )


def adjust_(logits: Tensor, row: SampleRow, start: int) -> None:
    """Apply a row's bias, penalties and bans in place to `logits` `[columns]`, ids `start, start + 1, ...`.

    Bias is added first (-100 and below forbids), then the repetition penalty (once for each id of prompt
    and output, dividing positive and multiplying negative logits: CTRL, Keskar et al. 2019), then the
    OpenAI penalties, `count * frequency + presence`, over output ids alone. Ids elsewhere are skipped.
    """
    params = row.params
    stop = start + logits.shape[0]
    if params.logit_bias:
        local = {i: b for i, b in params.logit_bias.items() if start <= i < stop}
        bias = [-torch.inf if b <= BAN else b for b in local.values()]
        index = torch.tensor(list(local), dtype=torch.int64, device=logits.device) - start
        logits[index] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)
    if params.repetition_penalty != 1.0:
        for index in _local_index(logits, start, row.prompt_ids, row.output_ids):
            seen = logits[index]
            penalty = params.repetition_penalty
            logits[index] = torch.where(seen < 0, seen * penalty, seen / penalty)
    if params.presence_penalty or params.frequency_penalty:
        for index in _local_index(logits, start, row.output_ids):
            ids, counts = index.unique(return_counts=True)
            logits[ids] -= counts * params.frequency_penalty + params.presence_penalty
    if len(row.banned_ids):
        for index in _local_index(logits, start, row.banned_ids):
            logits[index] = -torch.inf


def _local_index(logits: Tensor, start: int, *parts: TokenIds) -> list[Tensor]:
    """The ids that fall on this rank's columns, as one index tensor; no tensor when there are none."""
    ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]) - start
    ids = ids[(ids >= 0) & (ids < logits.shape[0])]
    return [torch.from_numpy(ids).to(logits.device)] if ids.size else []


def ordered_top(logits: Tensor, count: int, start: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, `[rows, count]` values (float64) and token ids (float64, exact).

    Larger values come first, and of equal values the lower id: unlike `torch.topk`, whose choice among
    equal values is open, so the answer does not depend on where the vocabulary is cut. Rows with fewer
    columns are filled up with (-inf, -1).
    """
    rows, columns = logits.shape
    taken = min(count, columns)
    # One integer holds both: a float's bits, made to sort like integers, above the inverted id.
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits = bits ^ (bits.bitwise_right_shift(31) & 0x7FFFFFFF)
    ids = torch.arange(start, start + columns, device=logits.device)
    keys = bits.long().bitwise_left_shift_(32).bitwise_or_(0xFFFFFFFF - ids)
    best = keys.topk(taken, dim=-1).values
    bits = best.bitwise_right_shift(32).int()
    found = (bits ^ (bits.bitwise_right_shift(31) & 0x7FFFFFFF)).view(torch.float32)
    values = torch.full((rows, count), -torch.inf, dtype=torch.float64, device=logits.device)
    token_ids = torch.full_like(values, -1.0)
    values[:, :taken] = found.double()
    token_ids[:, :taken] = (0xFFFFFFFF - best.bitwise_and(0xFFFFFFFF)).double()
    return values, token_ids


def sum_exp(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum and its sum of exp((logit - maximum) / temperature), `[rows]`, float64.

    A row without columns, or of -inf alone, gives (-inf, 0).
    """
    rows, columns = logits.shape
    top = torch.full((rows,), -torch.inf, dtype=torch.float64, device=logits.device)
    total = torch.zeros_like(top)
    if not columns:
        return top, total
    for tile in row_tiles(logits):
        values = logits[tile].double()
        top[tile] = values.amax(dim=-1)
        total[tile] = values.sub_(top[tile, None]).div_(temperatures[tile, None]).exp_().sum(dim=-1)
    return top, total.masked_fill_(top == -torch.inf, 0.0)


def row_tiles(logits: Tensor, width: int | None = None) -> Iterator[slice]:
    """Ranges of rows of which `width` columns (default all) stay within `tile_elements`, or single rows."""
    rows, columns = logits.shape
    step = max(1, tile_elements(logits.device) // max(width or columns, 1))
    return (slice(first, first + step) for first in range(0, rows, step))


def tile_elements(device: torch.device) -> int:
    """Elements to work on at a time: what a core's cache holds, what all threads share, or a GPU needs."""
    if device.type != "cpu":
        return 1 << 24
    threads = torch.get_num_threads()
    return 1 << 14 if threads == 1 else threads << 15  # torch gives a thread at least 2**15 elements
