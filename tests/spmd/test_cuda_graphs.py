"""Decode steps that are recorded once and replayed: padding, the choice of the size, new numbers in old
memory.

The graphs are stand-ins (support/graphs.py). What this does not prove: that CUDA can record the kernels, and
that replays are fast. `bench/gpu.py` does, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from support.graphs import RepeatedWork, TracedWork, recordable_kernels
from support.models import Reference, assert_greedy, at_most, build, grid_name, grids, random_ids, running

from spmd import SamplingParams, gpu
from spmd.batch import lay_out
from spmd.comm.errors import UserError
from spmd.comm.group import make_group
from spmd.cuda_graphs import StaticInputs, ladder
from spmd.gpu import GpuTools, choose_split, find_tools
from spmd.llm import LLM
from spmd.options import EngineOptions
from spmd.request import Request, Sequence
from spmd.scheduler import Chunk

CPU = torch.device("cpu")
MAX_RUNNING = 5  # recorded at 1, 2, 4 and 5


@contextmanager
def on_gpu_kernels(path: Any, capture: Any, **options: Any) -> Iterator[LLM]:
    """An `LLM` that computes as on a GPU, with the twins of its kernels."""
    tools = GpuTools(recordable_kernels(), 4, None, capture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spmd.loading.find_tools", lambda *_: tools)
        with running(path, **{"max_running": MAX_RUNNING, "max_model_len": 96, **options}) as llm:
            yield llm


def sequence_of(blocks: list[int], prompt: int = 9) -> Sequence:
    request = Request("", np.arange(prompt), SamplingParams(), 0, 99, frozenset())
    sequence = Sequence(request, 0, 0)
    sequence.blocks = blocks
    return sequence


def test_ladder_rises_to_the_most_sequences() -> None:
    assert ladder(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert ladder(5) == [1, 2, 4, 5]
    assert ladder(8) == [1, 2, 4, 8]
    assert ladder(1) == [1]
    assert ladder(20) == [1, 2, 4, 8, 16, 20]


def test_inputs_are_padded_and_stay_where_they_are() -> None:
    inputs = StaticInputs(4, 3, None, CPU)
    addresses = [tensor.data_ptr() for tensor in (inputs.numbers, inputs.tables)]
    one, two, three = sequence_of([7, 3], 17), sequence_of([5], 9), sequence_of([2, 4, 6], 40)
    inputs.fill(4, lay_out([Chunk(one, 16, 17), Chunk(two, 8, 9), Chunk(three, 39, 40)], False), None, None)
    one.output_ids = [11]
    inputs.fill(4, lay_out([Chunk(one, 17, 18)], False), None, None)
    # ids, positions, lengths, slots: a row is a sequence, then padding that holds and writes nothing
    assert inputs.numbers[:4].T.tolist() == [[11, 17, 18, 3 * 16 + 1], *[[0, -1, 1, -1]] * 3]
    assert inputs.tables[0, :2].tolist() == [7, 3]
    assert [tensor.data_ptr() for tensor in (inputs.numbers, inputs.tables)] == addresses


def test_block_tables_follow_sequences_that_grow_and_change_places() -> None:
    inputs = StaticInputs(2, 4, None, CPU)
    one, two = sequence_of([7], 99), sequence_of([1, 2], 99)

    def step(*sequences: Sequence) -> list[list[int]]:
        chunks = [Chunk(s, len(s.blocks) * 16 - 1, len(s.blocks) * 16) for s in sequences]
        inputs.fill(2, lay_out(chunks, False), None, None)
        return [inputs.tables[row, : len(s.blocks)].tolist() for row, s in enumerate(sequences)]

    assert step(one, two) == [[7], [1, 2]]
    one.blocks += [9, 4]
    assert step(one, two) == [[7, 9, 4], [1, 2]]
    assert step(two) == [[1, 2]]
    two.blocks = [8]  # as after a preemption
    assert step(two, one) == [[8], [7, 9, 4]]


SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
OTHERS = [
    SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=12, ignore_eos=True),
]


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_traced_steps_decode_whatever_comes_later(family: str, tmp_path: Path) -> None:
    """Replays of nothing but the tensor operations of the first time, against plain layers."""
    build(tmp_path, family, num_hidden_layers=2)
    prompts = [random_ids(count) for count in (1, 9, 24, 33)]
    capture = TracedWork()
    with running(tmp_path, kernels="torch") as llm:
        want = llm.generate(prompts, GREEDY)
    with on_gpu_kernels(tmp_path, capture, max_running=2) as llm:
        found = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in want]
    assert capture.replays >= 28


@pytest.mark.mpi
@at_most(4)
@pytest.mark.parametrize("grid", [g for g in grids() if g["dp"] == 1], ids=grid_name)
def test_every_grid_decodes_by_replay(zoo: dict[str, Reference], grid: dict[str, int]) -> None:
    """Greedy, drawn, filtered and penalized rows, alone and together: tokens as without any of this."""
    reference, capture = zoo["llama"], RepeatedWork()
    params = [GREEDY, SAMPLED, *OTHERS]
    drawn = [SAMPLED, GREEDY, SAMPLED]
    with running(reference.path, kernels="torch", **grid) as llm:
        want = [llm.generate(reference.ids, params), llm.generate(reference.ids[:3], drawn)]
    with on_gpu_kernels(reference.path, capture, **grid) as llm:
        found = [llm.generate(reference.ids, params), llm.generate(reference.ids[:3], drawn)]
        steps = llm.engine.steps
    for one, other in zip(chain(*found), chain(*want)):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert (one.outputs[0].logprobs is None) == (other.outputs[0].logprobs is None)
    assert_greedy(found[0][0].outputs[0].token_ids, reference.greedy[0])
    assert steps // 2 < capture.replays < steps


@pytest.mark.mpi
@at_most(1)
def test_what_is_no_plain_decode_is_computed_step_by_step(zoo: dict[str, Reference]) -> None:
    capture = RepeatedWork()
    reference = zoo["llama"]
    with on_gpu_kernels(reference.path, capture) as llm:
        logits = llm.logits(reference.ids[0])  # of one token: as small as a decode step, but no sampling
        scored = llm.generate(
            [reference.ids[1]], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        )
        assert capture.replays == 0
        kept = logits.clone()
        llm.generate(reference.ids[1:3], GREEDY)
        assert capture.replays > 0
        (graphs,) = llm.engine.pipeline._graphs or []
        results = [found for found, _ in graphs._steps.values()]
    assert len(results) == 4
    # The logits of all sizes are in one place, or each would hold memory of its own.
    assert len({found[0].untyped_storage().data_ptr() for found in results}) == 1
    assert {found[0].shape[0] for found in results} == {1, 2, 4, 5}
    torch.testing.assert_close(logits, kept)  # not the memory of a recorded step
    np.testing.assert_allclose(logits.numpy(), reference.logits[0], rtol=1e-3, atol=1e-3)
    assert scored[0].prompt_logprobs is not None


def test_graphs_are_refused_where_they_cannot_be() -> None:
    group = make_group(MPI.COMM_SELF)
    with pytest.raises(UserError, match="--cuda-graphs on: this rank computes on cpu, expected a GPU"):
        find_tools(EngineOptions(cuda_graphs="on"), CPU, group)
    with pytest.raises(UserError, match="--kernels torch"):
        find_tools(EngineOptions(cuda_graphs="on", kernels="torch"), torch.device("cuda:0"), group)
    assert find_tools(EngineOptions(kernels="torch"), torch.device("cuda:0"), group) is None
    staged = SimpleNamespace(capturable=False, backend="mpi", size=2)
    with pytest.raises(
        UserError, match="through host memory \\(mpi\\), which cannot be recorded, expected NCCL"
    ):
        find_tools(EngineOptions(cuda_graphs="on"), torch.device("cuda:0"), staged)  # type: ignore[arg-type]
    assert find_tools(EngineOptions(cuda_graphs="off"), CPU, group) is None
    with pytest.raises(UserError, match="cuda_graphs 'maybe': expected one of auto, on, off"):
        EngineOptions(cuda_graphs="maybe")
    group.free()


def test_split_is_used_from_the_smallest_size_where_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(MPI.COMM_SELF)

    class Stage:
        class placement:
            tp = group

    def run(stage: Any, cache: Any, host: Any, paging: Any) -> None:
        ran.append((host.tokens, paging.split_from is not None))

    def seconds(work: Any) -> float:
        work()
        tokens, split = ran[-1]
        # two parts save a tenth of the time, and cost as much as 100 tokens
        return tokens * 0.9 + 100 if split else float(tokens)

    from spmd.batch import Paging

    monkeypatch.setattr(gpu, "_run", run)
    paging = Paging(CPU, 1, 4)
    for tokens, want in ((8192, 2048), (512, None), (100, None)):
        ran: list[tuple[int, bool]] = []
        assert choose_split(Stage(), None, paging, tokens, seconds) == want  # type: ignore[arg-type]
    group.free()
