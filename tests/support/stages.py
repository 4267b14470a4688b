"""Stages of random weights, and batches of sequences that lie anywhere in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from spmd.batch import HostBatch, Paging, lay_out
from spmd.block_pool import blocks_for
from spmd.comm.partition import Partition
from spmd.config import ModelConfig
from spmd.kv_cache import KVCache
from spmd.layers.quantized import QuantizedTensor
from spmd.layers.weights import Placement
from spmd.models.decoder import ModelPartitions, StageModel
from spmd.request import Request, Sequence
from spmd.sampling_params import SamplingParams
from spmd.scheduler import Chunk

CPU = torch.device("cpu")
NUM_BLOCKS = 24
PAGING = Paging(CPU, num_kv_heads=1, multiprocessors=4)


class RandomWeights:
    """Any tensor that is asked for: random numbers that depend on its name alone."""

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        index: tuple[slice, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        if "norm" in name:
            whole = torch.rand(shape, generator=generator) + 0.5
        else:
            whole = torch.randn(shape, generator=generator) * 0.3
        return whole[index or ...].to(dtype or torch.float32)

    def get_blocks(
        self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] | None = None
    ) -> QuantizedTensor | None:
        return None


def whole_model(config: ModelConfig, placement: Placement) -> StageModel:
    layers = Partition.even(config.num_layers, 1)
    parts = ModelPartitions.build(config, placement.tp.size, layers, placement.quantize is not None)
    return StageModel(config, parts, 0, placement, RandomWeights(), not config.tie_word_embeddings)


def cache_of(config: ModelConfig, model: StageModel, content: float = 0.0) -> KVCache:
    heads = model.layers[0].num_kv_heads
    cache = KVCache(config.num_layers, NUM_BLOCKS, heads, config.head_dim, torch.float32, CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(content)
    return cache


def batches(rope_by_sequence: bool, vocab: int) -> Iterator[HostBatch]:
    """Three sequences in scattered blocks: prompts (one in two pieces), decode beside one, decode alone."""
    lengths, grown = (5, 20, 44), 4
    order = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    sequences = []
    for number, length in enumerate(lengths):
        ids = np.random.default_rng(length).integers(0, vocab, length)
        request = Request(str(number), ids, SamplingParams(), 0, 99, frozenset())
        sequence = Sequence(request, 0, 0)
        sequence.output_ids = [3] * grown
        sequence.blocks = [order.pop() for _ in range(blocks_for(length + grown))]
        sequences.append(sequence)
    one, two, three = sequences
    for chunks in (
        [Chunk(one, 0, 5), Chunk(two, 0, 20), Chunk(three, 0, 10)],
        [Chunk(one, 5, 6), Chunk(two, 20, 21), Chunk(three, 10, 44)],
        [Chunk(one, 6, 7), Chunk(two, 21, 22), Chunk(three, 44, 45)],
        [Chunk(three, 45, 46)],
    ):
        total = sum(chunk.stop - chunk.start for chunk in chunks)
        yield lay_out(chunks, rope_by_sequence, output_rows=np.arange(total))
