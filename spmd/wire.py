"""The form in which sampled ids and their logprobs travel from the last stage to the others.

One fp64 row a sequence, of a width that every rank works out by itself: token id, then, if any sequence of
the micro-batch wants logprobs, the token's logprob and `k` pairs (id, logprob), k the largest asked for.
fp64 holds every id exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from spmd.outputs import TokenLogprob
from spmd.request import Sequence
from spmd.sampler import Sampled


def row_width(sequences: Rows[Sequence]) -> int:
    """Columns of a row for these sequences."""
    wanted = [s.request.params.logprobs for s in sequences if s.request.params.logprobs is not None]
    return 2 + 2 * max(wanted) if wanted else 1


def encode(sampled: Rows[Sampled], width: int) -> Tensor:
    """Rows `[sequences, width]`; unused columns are NaN."""
    table = []
    for one in sampled:
        row = [float(one.token_id)]
        if one.logprob is not None:
            row.append(one.logprob)
            for token_id, logprob in one.top:
                row += [float(token_id), logprob]
        table.append(row + [math.nan] * (width - len(row)))
    return torch.tensor(table, dtype=torch.float64).reshape(len(sampled), width)


def score_width(sequences: Rows[Sequence]) -> int:
    """Columns of a row of prompt scores for these sequences: token id, logprob and the pairs."""
    return 2 + 2 * max((s.request.params.prompt_logprobs or 0 for s in sequences), default=0)


def decode(row: Rows[float], logprobs: int | None) -> tuple[int, TokenLogprob | None]:
    """One row back into the token id and, if the sequence wants them, its logprobs."""
    token_id = int(row[0])
    if logprobs is None:
        return token_id, None
    pairs = zip(row[2 : 2 + 2 * logprobs : 2], row[3 : 3 + 2 * logprobs : 2])
    top = tuple((int(other), value) for other, value in pairs if not math.isnan(other))
    return token_id, TokenLogprob(token_id, row[1], top)
