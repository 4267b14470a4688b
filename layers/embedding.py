"""Vocabulary-parallel embedding and output head, for any vocabulary size and any number of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd.comm.partition import Partition
from spmd.layers.kernels.matmul import linear
from spmd.layers.weights import Placement, Weights


class VocabParallelEmbedding:
    """Each rank holds the rows of its range of token ids; nothing is padded.

    token_ids `[tokens]` int64 -> hidden states `[tokens, hidden]` on every rank of the TP group.
    """

    def __init__(
        self, weights: Weights, placement: Placement, name: str, vocab: Partition, hidden_size: int
    ) -> None:
        self.tp = placement.tp
        self.start, self.stop = vocab.start(self.tp.rank), vocab.stop(self.tp.rank)
        index = (slice(self.start, self.stop), slice(0, hidden_size))
        self.weight = placement.load(weights, name, (vocab.total, hidden_size), index)

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        mine = (token_ids >= self.start) & (token_ids < self.stop)
        out = torch.zeros(
            token_ids.shape[0], self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device
        )
        out[mine] = self.weight[token_ids[mine] - self.start]
        # One rank contributes the row, the others zeros: the sum is exact in any dtype.
        return self.tp.all_reduce(out)


class VocabParallelHead:
    """Output head over this rank's range of token ids: `[tokens, hidden]` -> fp32 `[tokens, local_vocab]`.

    A rank computes logits of real ids only, so there is no padded id to mask.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @classmethod
    def load(
        cls, weights: Weights, placement: Placement, name: str, vocab: Partition, hidden_size: int
    ) -> VocabParallelHead:
        index = (vocab.slice(placement.tp.rank), slice(0, hidden_size))
        return cls(placement.load(weights, name, (vocab.total, hidden_size), index))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return linear(hidden_states, self.weight).float()
