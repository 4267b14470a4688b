"""`--plan auto`: whatever grid it picks for the ranks it finds, given sizes stay and ids are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi4py import MPI
from support.models import (
    Reference,
    assert_greedy,
    at_most,
    build,
    on_rank_zero,
    random_ids,
    reference_of,
    running,
)

from spmd.comm.errors import UserError
from spmd.options import EngineOptions
from spmd.planning import node_blocks, plan_options
from spmd.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
WORLD = MPI.COMM_WORLD.size


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    def make() -> Reference:
        folder = tmp_path_factory.mktemp("planned")
        prompts = [random_ids(9, seed=1), random_ids(24, seed=2)]
        return reference_of(build(folder, num_hidden_layers=4), folder, prompts, 8)

    return on_rank_zero(make)


@pytest.mark.mpi(min_size=2)
@at_most(3)
def test_chosen_grid_gives_the_ids_of_one_rank(model: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(Path("/dev/shm").glob("spmd_plan_*"))  # of jobs that were killed
    # At two ranks one size is given, at three none.
    given = {"dp": 1} if WORLD == 2 else {}
    with running(model.path, plan="auto", **given) as llm:
        sizes = (llm.grid.dp_size, llm.grid.pp_size, llm.grid.tp_size)
        assert sizes[0] == given.get("dp", sizes[0])
        for output, expected in zip(llm.generate(model.ids, GREEDY), model.greedy):
            assert_greedy(output.outputs[0].token_ids, expected)
    printed = capsys.readouterr().err
    if MPI.COMM_WORLD.rank == 0:
        found = re.search(r"spmd: plan auto: dp (\d+) x pp (\d+) x tp (\d+), in [\d.]+ s\. \w+", printed)
        assert found is not None, printed
        assert tuple(map(int, found.groups())) == sizes
    else:
        assert printed == ""
    assert set(Path("/dev/shm").glob("spmd_plan_*")) <= before


@pytest.mark.mpi(min_size=2)
@at_most(2)
def test_given_sizes_stay() -> None:
    # Nothing is measured, or even read, where nothing is left to choose.
    for given in ({"tp": WORLD, "pp": 1}, {"tp": 1, "pp": WORLD}):
        options = EngineOptions("no such model", plan="auto", **given)
        assert plan_options(options, MPI.COMM_WORLD) == options


@pytest.mark.mpi(min_size=2)
@at_most(2)
def test_what_does_not_fit_is_refused_on_every_rank(model: Reference) -> None:
    # A KV cache larger than any host.
    options = EngineOptions(str(model.path), plan="auto", kv_memory=10**18, dtype="float32", threads=1)
    with pytest.raises(UserError, match=r"plan auto: no grid fits: .* KV cache 1,000,000 TB"):
        plan_options(options, MPI.COMM_WORLD)


@pytest.mark.parametrize(
    ("nodes", "blocks"),
    [
        ([0], (1, 1)),
        ([0, 0, 0, 0], (1, 4)),
        ([0, 0, 1, 1], (2, 2)),
        ([0, 0, 0, 0, 1, 1], (3, 2)),  # four and two: pairs never leave a node
        ([0, 0, 0, 1, 1], (5, 1)),
        ([0, 1, 0, 1], (4, 1)),  # dealt round: neighbours are on different nodes
    ],
)
def test_blocks_of_ranks_inside_nodes(nodes: list[int], blocks: tuple[int, int]) -> None:
    assert node_blocks(nodes) == blocks


def test_mistakes() -> None:
    with pytest.raises(UserError, match="plan 'best': expected auto"):
        EngineOptions(plan="best")
    with pytest.raises(UserError, match="pp_interleave 2 needs a given pp"):
        plan_options(EngineOptions(plan="auto", pp_interleave=2), MPI.COMM_SELF)
