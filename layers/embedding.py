"""Vocabulary-parallel embedding and output head, for any vocabulary size and any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd.comm.partition import Partition
from spmd.layers.kernels.matmul import linear
from spmd.layers.quantized import QuantizedTensor, Weight
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
        self.weight = _fine(placement).load_matrix(weights, name, (vocab.total, hidden_size), index)
        self._dtype = placement.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self._rows(token_ids)
        # One rank contributes the row, the others zeros: the sum is exact in any dtype. No size here depends
        # on what the ids are, so that the step can be recorded in a CUDA graph.
        if self.start == self.stop:
            shape = (token_ids.shape[0], self.weight.shape[1])
            return self.tp.all_reduce(torch.zeros(shape, dtype=self._dtype, device=self.weight.device))
        elsewhere = (token_ids < self.start) | (token_ids >= self.stop)
        rows = self._rows((token_ids - self.start).masked_fill_(elsewhere, 0))
        return self.tp.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def _rows(self, places: Tensor) -> Tensor:
        if isinstance(self.weight, QuantizedTensor):
            return self.weight[places].dequantize().to(self._dtype)
        return F.embedding(places, self.weight)


class VocabParallelHead:
    """Output head over this rank's range of token ids: `[tokens, hidden]` -> fp32 `[tokens, local_vocab]`.

    A rank computes logits of real ids only, so there is no padded id to mask.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    @classmethod
    def load(
        cls, weights: Weights, placement: Placement, name: str, vocab: Partition, hidden_size: int
    ) -> VocabParallelHead:
        index = (vocab.slice(placement.tp.rank), slice(0, hidden_size))
        return cls(_fine(placement).load_matrix(weights, name, (vocab.total, hidden_size), index))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return linear(hidden_states, self.weight).float()


def _fine(placement: Placement) -> Placement:
    """Embedding and head are not rounded to less than 8 bits: errors there reach every logit."""
    return replace(placement, quantize="Q8_0") if placement.quantize is not None else placement
