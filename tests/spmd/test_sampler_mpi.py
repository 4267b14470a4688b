"""All ranks of a tensor-parallel group commit the same tokens, over real messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI

from spmd.comm.errors import UserError
from spmd.comm.group import Group, make_group
from spmd.comm.partition import Partition
from spmd.sampler import Sampler, SampleRow
from spmd.sampling_params import SamplingParams

pytestmark = pytest.mark.mpi

VOCAB, ROWS, STEPS = 131, 32, 64
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9, "temperature": 1.2},
    {"top_k": 10, "logprobs": 2},
    {"min_p": 0.05, "repetition_penalty": 1.2},
]


@pytest.fixture(params=["shm", "mpi"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    result = make_group(MPI.COMM_WORLD, request.param)
    yield result
    result.free()


def sampler_of(group: Group) -> tuple[Sampler, slice]:
    """A sampler over an uneven cut; from three ranks on, the second holds nothing."""
    counts = list(Partition.even(VOCAB - 10, group.size).counts)
    counts[0] += 10
    if group.size > 2:
        counts[0], counts[1] = counts[0] + counts[1], 0
    vocab = Partition.from_counts(counts)
    return Sampler(vocab, group, sampleable=VOCAB - 1), vocab.slice(group.rank)


def generate(sampler: Sampler, columns: slice, noise: float) -> list[list[int]]:
    """Token lists of `ROWS` sequences whose next logits follow from the tokens so far."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    disturbance = torch.Generator().manual_seed(MPI.COMM_WORLD.rank)
    outputs: list[list[int]] = [[i] for i in range(ROWS)]
    for step in range(STEPS):
        logits = table[[output[-1] for output in outputs]][:, columns].clone()
        if noise and MPI.COMM_WORLD.rank:
            logits += noise * torch.randn(logits.shape, generator=disturbance)
        rows = [
            SampleRow(SamplingParams(**KINDS[i % len(KINDS)]), 77 + i, step, output[:1], output[1:])
            for i, output in enumerate(outputs)
        ]
        for output, sampled in zip(outputs, sampler(logits, rows)):
            output.append(sampled.token_id)
    return outputs


def test_ranks_agree_and_equal_one_rank(group: Group) -> None:
    together = generate(*sampler_of(group), noise=0.0)
    assert group.all_gather_objects(together) == [together] * group.size
    alone = Sampler(Partition((0, VOCAB)), make_group(MPI.COMM_SELF), sampleable=VOCAB - 1)
    assert generate(alone, slice(0, VOCAB), noise=0.0) == together


def test_ranks_agree_when_their_logits_are_disturbed(group: Group) -> None:
    outputs = generate(*sampler_of(group), noise=1e-3)
    assert group.all_gather_objects(outputs) == [outputs] * group.size


def test_exact_ties_go_to_the_lowest_id(group: Group) -> None:
    sampler, columns = sampler_of(group)
    logits = torch.zeros(3, VOCAB)
    logits[1, [60, 90, 130]] = 1.0
    logits[2, [129, 130]] = 1.0
    greedy = SampleRow(SamplingParams(temperature=0.0), 0, 0, [], [])
    assert [s.token_id for s in sampler(logits[:, columns], [greedy] * 3)] == [0, 60, 129]


def test_errors_are_raised_on_every_rank(group: Group) -> None:
    sampler, columns = sampler_of(group)
    logits = torch.zeros(2, VOCAB)
    logits[1, VOCAB - 2] = torch.nan  # on the last rank only
    row = SampleRow(SamplingParams(top_p=0.5), 0, 0, [], [])
    with pytest.raises(RuntimeError, match="row 1"):
        sampler(logits[:, columns], [row, row])
    banned = SampleRow(SamplingParams(), 0, 0, [], [], banned_ids=range(VOCAB))
    with pytest.raises(UserError, match="row 0"):
        sampler(logits[:1, columns], [banned])
    assert 0 <= sampler(logits[:1, columns], [row])[0].token_id < VOCAB
