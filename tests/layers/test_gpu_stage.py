"""The GPU stage on the CPU, by the torch twins of its kernels, against plain layers on one rank: every
family, uneven splits of the heads, windows, batches of any mix, batches in two parts.

What this does not prove: the kernels themselves (test_gpu_*.py), and anything about streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from mpi4py import MPI
from support.models import FAMILIES, config_of
from torch import Tensor

from spmd.batch import HostBatch, Paging, lay_out
from spmd.block_pool import BLOCK_SIZE, blocks_for
from spmd.comm.group import Group, make_group
from spmd.comm.partition import Partition
from spmd.config import ModelConfig
from spmd.kv_cache import KVCache
from spmd.layers.kernels.gpu_table import torch_kernels
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


class DelayedOverlap:
    """Work that is done only when it is waited for: the latest that a stream of its own may do it."""

    def start(self, work: Callable[[], object]) -> Callable[[], object]:
        return work


@pytest.fixture
def tp() -> Iterator[Group]:
    group = make_group(MPI.COMM_WORLD)
    yield group
    group.free()


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


@pytest.mark.mpi
@pytest.mark.skipif(MPI.COMM_WORLD.size > 3, reason="3 ranks show it")
@pytest.mark.parametrize("split_from", [None, 2], ids=["whole", "two parts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stage_matches_plain_layers(family: str, split_from: int | None, tp: Group) -> None:
    config = ModelConfig.from_dict(config_of(family, num_hidden_layers=2))
    overlap = DelayedOverlap() if split_from is not None else None
    alone = make_group(MPI.COMM_SELF)
    plain = whole_model(config, Placement(torch.float32, CPU, alone))
    fused = whole_model(config, Placement(torch.float32, CPU, tp, gpu=torch_kernels(), overlap=overlap))
    plain_cache, cache = cache_of(config, plain), cache_of(config, fused, math.nan)
    vocab = ModelPartitions.build(config, tp.size, Partition.even(2, 1)).vocab.slice(tp.rank)
    paging = replace(PAGING, split_from=split_from)
    by_sequence = plain.rotary.switch_length is not None
    for host in batches(by_sequence, config.vocab_size):
        want = plain.forward(host.with_spans(CPU), None, plain_cache.keys, plain_cache.values)
        batch = host.with_tables(paging)
        assert len(batch.attention) == (1 if split_from is None or host.tokens < 2 else 2)
        found = fused.forward(batch, None, cache.keys, cache.values)
        torch.testing.assert_close(found, want[:, vocab], rtol=1e-3, atol=1e-3)
    alone.free()


@pytest.mark.mpi
@pytest.mark.skipif(MPI.COMM_WORLD.size > 3, reason="3 ranks show it")
def test_more_ranks_than_heads_and_blocks_of_few_bits(tp: Group) -> None:
    """A rank without heads takes part; int8 weights go through the kernels as blocks."""
    config = ModelConfig.from_dict(
        config_of(
            "llama",
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=96,
        )
    )
    alone = make_group(MPI.COMM_SELF)
    plain = whole_model(config, Placement(torch.float32, CPU, alone, quantize="Q8_0"))
    fused = whole_model(config, Placement(torch.float32, CPU, tp, quantize="Q8_0", gpu=torch_kernels()))
    plain_cache, cache = cache_of(config, plain), cache_of(config, fused, math.nan)
    vocab = ModelPartitions.build(config, tp.size, Partition.even(2, 1)).vocab.slice(tp.rank)
    assert isinstance(fused.layers[0].qkv.weight, QuantizedTensor)
    for host in batches(False, config.vocab_size):
        want = plain.forward(host.with_spans(CPU), None, plain_cache.keys, plain_cache.values)
        found = fused.forward(host.with_tables(PAGING), None, cache.keys, cache.values)
        torch.testing.assert_close(found, want[:, vocab], rtol=1e-3, atol=1e-3)
    alone.free()


def test_tables_say_where_tokens_lie() -> None:
    """Every token is found through its sequence's table where its slot says, in one part and in two."""
    for host in batches(False, 100):
        for split_from in (None, 2):
            parts = host.with_tables(replace(PAGING, split_from=split_from)).attention
            slots = torch.cat([part.slot_mapping for part in parts]).tolist()
            found = []
            for part in parts:
                starts, lengths = part.query_starts.tolist(), part.kv_lens.tolist()
                for table, first, last, held in zip(part.block_tables, starts, starts[1:], lengths):
                    for position in range(held - (last - first), held):
                        block = int(table[position // BLOCK_SIZE])
                        found.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            assert found == slots == host.numbers[3].tolist()


def test_one_spans_form_needs_no_kernels_and_tables_do() -> None:
    config = ModelConfig.from_dict(config_of("llama", num_hidden_layers=2))
    alone = make_group(MPI.COMM_SELF)
    plain = whole_model(config, Placement(torch.float32, CPU, alone))
    cache = cache_of(config, plain)
    host = next(batches(False, config.vocab_size))
    with pytest.raises(TypeError, match="no kernels"):
        plain.forward(host.with_tables(PAGING), None, cache.keys, cache.values)
    alone.free()
