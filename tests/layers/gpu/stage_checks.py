"""A whole stage on the Triton kernels, and its recorded decode steps, against plain layers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from mpi4py import MPI
from support.graphs import RepeatedWork
from support.models import config_of
from support.stages import CPU, PAGING, batches, cache_of, whole_model
from support.triton_device import INTERPRETED

from spmd.comm.group import make_group
from spmd.comm.partition import Partition
from spmd.config import ModelConfig
from spmd.cuda_graphs import DecodeGraphs
from spmd.layers.kernels.gpu_table import triton_kernels
from spmd.layers.weights import Placement
from spmd.sampler import Sampler, SampleRow, plain_draws
from spmd.sampling_params import SamplingParams


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU bench/gpu.py runs whole models")
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_stage_on_triton_kernels(family: str) -> None:
    config = ModelConfig.from_dict(config_of(family, num_hidden_layers=1))
    alone = make_group(MPI.COMM_SELF)
    plain = whole_model(config, Placement(torch.float32, CPU, alone))
    fused = whole_model(config, Placement(torch.float32, CPU, alone, gpu=triton_kernels()))
    plain_cache, cache = cache_of(config, plain), cache_of(config, fused, math.nan)
    graphs = None
    for host in batches(False, config.vocab_size):
        want = plain.forward(host.with_spans(CPU), None, plain_cache.keys, plain_cache.values)
        if host.tokens > len(host.chunks):
            found = fused.forward(host.with_tables(PAGING), None, cache.keys, cache.values)
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
            continue
        if graphs is None:
            vocab = Partition.even(config.vocab_size, 1)
            graphs = DecodeGraphs(fused, cache, PAGING, vocab, [4], 64, RepeatedWork())
        rows = [
            SampleRow(SamplingParams(temperature=temperature), seed, 0, [], [])
            for seed, temperature in enumerate([0.0, 0.7, 1.1][: host.tokens])
        ]
        decode = replace(host, is_decode=True)
        assert graphs.size_for(decode) == 4
        found, winners = graphs.run(4, decode, None, plain_draws(rows))
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
        assert winners is not None
        sampler = Sampler(vocab, alone)
        assert sampler(found, rows, winners) == sampler(found, rows)
    assert graphs is not None
    alone.free()
