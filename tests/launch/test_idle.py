"""A rank that waits for another costs next to nothing."""

from __future__ import annotations

from pathlib import Path

from support.mpirun import mpirun

SHARE = 0.05  # of a core

SCRIPT = """
import math, time
import torch
from mpi4py import MPI
from spmd.launch.start import start_grid
from spmd.launch.timers import set_fine_sleeps

torch.set_num_threads(1)
set_fine_sleeps()
world = MPI.COMM_WORLD
x = torch.ones(1000)
for backend in ("shm", "mpi"):
    tp = start_grid(world, 2, backend=backend).tp
    calls = {
        "all_reduce": lambda: tp.all_reduce(x),
        "broadcast": lambda: tp.broadcast(x, 0),
        "recv": lambda: tp.recv(x, 0) if tp.rank else tp.send(x, 1),
        "broadcast_object": lambda: tp.broadcast_object("news", 0, math.inf),
    }
    if backend == "shm":  # messages are the same there
        del calls["recv"], calls["broadcast_object"]
    for call in calls.values():
        call()
    for name, call in calls.items():
        tp.barrier()
        if tp.rank == 0:
            time.sleep(1.5)
            call()
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print("waited", name, backend, wall, cpu / wall, flush=True)
"""


def test_a_waiting_rank_sleeps(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = mpirun(2, [str(script)], 100)
    assert done.code == 0, done.output
    waits = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("waited")]
    assert len(waits) == 6, done.output
    for name, backend, wall, share in waits:
        print(f"{name} ({backend}): {100 * float(share):.1f} % of a core")
        assert float(wall) > 1.0
        assert float(share) < SHARE, (name, backend)
