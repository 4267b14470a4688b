"""The engine over NCCL groups, on the stand-in of recording_nccl.py: the ids are `transformers`', and hidden
states take the streams of the pipeline's routes. That nothing waits for the device is not shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI
from support.models import Reference, assert_greedy, grid_name
from support.recording_nccl import CURRENT_STREAM, RecordingNccl

from spmd import llm as llm_module
from spmd.comm.grid import Grid
from spmd.comm.nccl import NcclGroup
from spmd.llm import LLM
from spmd.sampling_params import SamplingParams

WORLD = MPI.COMM_WORLD.size
GRIDS: dict[int, list[dict[str, int]]] = {
    2: [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 2, "pp_interleave": 2}],
    3: [{"tp": 1, "pp": 3}],
    4: [{"tp": 2, "pp": 2}],
}

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD not in GRIDS, reason="for 2 to 4 ranks")]


@pytest.mark.parametrize("grid", GRIDS.get(WORLD, [{}]), ids=grid_name)
def test_ids_are_those_of_the_reference(
    zoo: dict[str, Reference], grid: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, library = zoo["llama"], RecordingNccl()
    start_grid = llm_module.start_grid

    def start_with_nccl(*arguments: Any) -> Grid:
        made = start_grid(*arguments)
        for name in ("tp", "pp"):
            host = getattr(made, name)
            if host.size > 1:
                setattr(made, name, NcclGroup.open(host, library, torch.device("cpu")))
        return made

    monkeypatch.setattr(llm_module, "start_grid", start_with_nccl)
    llm = LLM(str(reference.path), dtype="float32", kernels="torch", threads=1, **grid)
    library.take_calls()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate(reference.ids, params)
    calls = library.take_calls()
    llm.close()
    for output, expected in zip(outputs, reference.greedy):
        assert_greedy(output.outputs[0].token_ids, expected)
    sent = {call.arguments[4] for call in calls if call.name == "send"}
    received = {call.arguments[4] for call in calls if call.name == "recv"}
    summed = [call for call in calls if call.name == "allReduce"]
    first, last = llm.grid.pp_rank == 0, llm.grid.pp_rank == grid["pp"] - 1
    rounds = grid.get("pp_interleave", 1)
    assert len(sent) == (0 if grid["pp"] == 1 else rounds - last)
    assert len(received) == (0 if grid["pp"] == 1 else rounds - first)
    assert CURRENT_STREAM not in sent | received
    assert sent.isdisjoint(received)
    assert bool(summed) == (grid["tp"] > 1)
