"""The GPU stage on the CPU, by the torch twins of its kernels, against plain layers on one rank: every
family, uneven splits of the heads, windows, batches of any mix, batches in two parts.

What this does not prove: the kernels themselves (test_gpu_*.py), and anything about streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from mpi4py import MPI
from support.models import FAMILIES, config_of
from support.stages import CPU, PAGING, batches, cache_of, whole_model

from spmd.block_pool import BLOCK_SIZE
from spmd.comm.group import Group, make_group
from spmd.comm.partition import Partition
from spmd.config import ModelConfig
from spmd.layers.kernels.gpu_table import torch_kernels
from spmd.layers.quantized import QuantizedTensor
from spmd.layers.weights import Placement
from spmd.models.decoder import ModelPartitions


class DelayedOverlap:
    """Work that is done only when it is waited for: the latest that a stream of its own may do it."""

    def start(self, work: Callable[[], object]) -> Callable[[], object]:
        return work


@pytest.fixture
def tp() -> Iterator[Group]:
    group = make_group(MPI.COMM_WORLD)
    yield group
    group.free()


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
