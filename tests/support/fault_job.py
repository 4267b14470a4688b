"""A job whose rank 1 does what the first argument says; tests of launch/ start it.

    mpirun -n 3 python fault_job.py FAULT:BACKEND FOLDER

What ranks note, such as the time of the fault, goes to the file FOLDER/FAULT: launchers may lose output.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

import spmd.llm  # noqa: F401 (installs what ends a user's script)
from spmd.comm.group import Group
from spmd.launch.start import start_grid

TIMEOUT_S = 2.0

fault, backend = sys.argv[1].split(":")
notes = open(Path(sys.argv[2]) / fault, "a")  # noqa: SIM115 (lives as long as the process)
world = MPI.COMM_WORLD
rank = world.rank
x = torch.ones(1000)


def tell(*words: object) -> None:
    print(*words, file=notes, flush=True)


def strike() -> None:
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        if "/dev/shm/" in line:
            tell("shared", line.split()[5])
    tell("fault", time.time())


def launcher() -> int:
    pid = os.getpid()
    while True:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith(("mpirun", "mpiexec", "prterun", "orterun")):
            return pid


def befall(tp: Group) -> None:
    if fault == "exception":
        raise RuntimeError("the fault")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "interrupted":
        os.kill(launcher(), signal.SIGINT)
    if fault == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        tp.all_reduce(torch.ones(1 << 30))
    if fault == "left":
        sys.exit()
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "busy":
        while True:
            x.add(1)  # busy here
    if fault == "in MPI":
        world.Recv(bytearray(8), source=0, tag=55)  # stuck here
    if fault == "other call":
        tp.broadcast(x, 0)  # another call
    if fault == "skipped call":
        tp.all_gather(x, [1000] * tp.size)  # one call too early
        tp.recv(x, 0)


if fault == "killed early":
    world.Barrier()
    if rank == 1:
        strike()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if fault == "left early" and rank == 1:
    strike()
    sys.exit()
if fault == "missing early" and rank == 1:
    strike()
    time.sleep(60)
tp = start_grid(world, world.size, backend=backend, timeout_s=TIMEOUT_S).tp
for _ in range(3):
    tp.all_reduce(x)
if rank == 1:
    strike()
    befall(tp)
if fault == "skipped call":
    tp.all_reduce(x)  # the call that rank 1 skips
    tp.all_gather(x, [1000] * tp.size)
    tp.recv(x, 0)
tp.all_reduce(x)  # waits here
if fault == "ends well":
    if rank == 0:
        time.sleep(1.5)  # longer than others take for granted
    tell("done", rank)
    sys.exit()
time.sleep(60)
