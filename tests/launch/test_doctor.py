"""The preflight check says what there is and finds what is wrong; a running job shows where its ranks are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.mpirun import Finished, clean_environment, command_line, mpirun

from spmd.launch.doctor_report import SHM_PER_RANK, Examination, format_page, judge
from spmd.launch.pingpong import Link
from spmd.launch.rank_facts import RankFacts, measure_read

GB = 10**9
HEALTHY = RankFacts(
    rank=0,
    host="n0",
    node=0,
    versions={"python": "3.12.1", "MPI": "MPICH 5.0.2", "torch": "2.13.0"},
    threading="multiple",
    launcher="srun",
    local_rank=0,
    cpu_count=64,
    cpus="0-15",
    shares_cpus=False,
    threads=16,
    domains=[0],
    load=1.0,
    device="cpu",
    device_error=None,
    memory=256 * GB,
    memory_free=200 * GB,
    shm=128 * GB,
    shm_free=128 * GB,
    cupy=None,
    nccl=None,
    copy_speed=20.0 * GB,
)


def cluster(nodes: int = 2, per_node: int = 4) -> list[RankFacts]:
    return [
        replace(HEALTHY, rank=rank, host=f"n{rank // per_node}", node=rank // per_node)
        for rank in range(nodes * per_node)
    ]


def links(ranks: list[RankFacts]) -> list[Link]:
    found = []
    for a in ranks:
        for b in ranks[a.rank + 1 :]:
            near = a.node == b.node
            found.append(Link(a.rank, b.rank, near, 1e-6 if near else 10e-6, (10 if near else 2) * GB))
    return found


def judged(ranks: list[RankFacts], measured: list[Link] | None = None) -> Examination:
    found = Examination(ranks, links(ranks) if measured is None else measured, "dp 1 x pp 2 x tp 4")
    judge(found)
    return found


def test_a_healthy_cluster_has_nothing_wrong() -> None:
    found = judged(cluster())
    assert (found.errors, found.warnings) == ([], [])
    page = format_page(found)
    assert "8 ranks on 2 nodes, started by srun" in page
    assert "links inside nodes: typically 1.0 us, 10 GB/s" in page
    assert "links between nodes: typically 10.0 us, 2 GB/s" in page
    assert "nothing is wrong" in page
    assert len(format_page(judged(cluster(16, 8))).splitlines()) < 40  # one page for 128 ranks, too


def test_what_is_wrong_is_named_with_its_rank() -> None:
    ranks = cluster()
    ranks[5].versions = {**HEALTHY.versions, "torch": "2.12.0"}
    ranks[3].device, ranks[3].device_error = "none", "--device cuda: no GPU is visible on this node"
    ranks[4].shm_free = SHM_PER_RANK
    errors = judged(ranks).errors
    assert "torch differs: 2.12.0 on rank 5; 2.13.0 on ranks 0, 1, 2, 3, 4, 6, 7" in errors
    assert "--device cuda: no GPU is visible on this node" in errors
    assert any(text.startswith("n1 (ranks 4-7): 16.8 MB of shared memory are free") for text in errors)
    assert len(errors) == 3


def test_what_is_slow_is_a_warning() -> None:
    ranks = cluster()
    ranks[6].copy_speed = 3.0 * GB
    ranks[0].load = 50.0
    measured = links(ranks)
    slow = next(i for i, link in enumerate(measured) if (link.first, link.second) == (2, 7))
    measured[slow] = replace(measured[slow], latency_s=1e-3, bandwidth=0.1 * GB)
    found = judged(ranks, measured)
    assert found.errors == []
    assert [text for text in found.warnings if "rank 6 (n1) copies memory at 3 GB/s" in text]
    assert [text for text in found.warnings if "n0 (ranks 0-3): something else is running" in text]
    assert [text for text in found.warnings if "ranks 2 and 7 take 1000 us, between others 10 us" in text]
    assert [text for text in found.warnings if "between ranks 2 and 7 100 MB/s get through" in text]
    assert len(found.warnings) == 4


def test_each_node_reads_its_own_part(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "large").write_bytes(bytes(4 << 20))
    for part in range(2):
        speed = measure_read(tmp_path, part, 2)
        assert speed is not None
        assert 1e6 < speed < 1e12
    assert measure_read(tmp_path, 0, 100) is None  # too little to time


def test_the_page_of_two_ranks(tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(2 << 20))
    arguments = ["-m", "spmd.launch.doctor", "--tp", "2", "--model", str(model), "--json", str(written)]
    done = mpirun(2, arguments)
    assert done.code == 0, done.output
    found = json.loads(written.read_text())
    assert [facts["rank"] for facts in found["ranks"]] == [0, 1]
    assert found["grid"] == "dp 1 x pp 1 x tp 2"
    assert found["ranks"][0]["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert [(link["first"], link["second"]) for link in found["links"]] == [(0, 1)]
    assert all(facts["copy_speed"] > 1e8 for facts in found["ranks"])
    assert found["ranks"][0]["read_speed"] > 1e6
    assert done.stdout.count("spmd doctor: 2 ranks on 1 node") == 1, done.output
    assert "model read at" in done.stdout


def test_a_grid_that_does_not_fit_is_wrong() -> None:
    done = mpirun(2, ["-m", "spmd.launch.doctor", "--tp", "3"])
    assert done.code == 1, done.output
    assert "error: world: 2 ranks do not factor into tp 3" in done.stdout
    assert "Abort" not in done.stderr, done.output


JOB = """
import os, sys, time
import torch
from mpi4py import MPI
from spmd.launch.start import start_grid
world = MPI.COMM_WORLD
tp = start_grid(world, world.size).tp
tp.all_reduce(torch.ones(10))
print("ready", os.getpid(), flush=True)
if world.rank == 0:
    sys.stdin.readline()  # until the test has looked
tp.all_reduce(torch.ones(25))  # rank 1 waits here
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds ledgers by /proc")
def test_a_running_job_shows_where_its_ranks_are(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    waits = next(n for n, text in enumerate(JOB.splitlines(), 1) if "waits here" in text)
    job = subprocess.Popen(
        command_line(2, [str(script)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        assert job.stdout is not None
        ready = [job.stdout.readline() for _ in range(2)]
        pid = ready[0].split()[1]
        shown = doctor("--job", pid)
        assert shown.code == 0, shown.output
        assert re.search(
            r"rank 0: computing, in no collective for \d+\.\d s; the last was all_reduce of 40 b",
            shown.stdout,
        )
        waiting = r"rank 1: in all_reduce of 100 bytes, number 2 of the tp group \(ranks 0, 1\), for "
        assert re.search(rf"{waiting}\d+\.\d s, at .*job.py:{waits} ", shown.stdout), shown.output
        assert doctor("--job", "999999999").code == 1
        _, stderr = job.communicate("go on\n", timeout=30)
        assert job.returncode == 0, stderr
    finally:
        job.kill()
        job.communicate()
    assert doctor("--job", pid).code == 1


def doctor(*arguments: str) -> Finished:
    return mpirun(1, ["-m", "spmd.launch.doctor", *arguments], 60)
