"""What a rank finds out about itself and its node, for the preflight check."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI

from spmd.comm.errors import UserError
from spmd.comm.ledger import ledger_folder
from spmd.launch.cores import Topology, bind_cores, format_cpus, read_text
from spmd.launch.devices import take_device
from spmd.launch.launcher import find_launch

if TYPE_CHECKING:
    from spmd.comm.group import Group

PACKAGES = ("spmd", "torch", "numpy", "mpi4py", "safetensors", "tokenizers", "transformers", "triton")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_COPY_BYTES = 64 << 20
_COPY_S = 0.2
_READ_BYTES = 256 << 20
_PIECE_BYTES = 8 << 20
_THREADING = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


@dataclass
class RankFacts:
    """One rank. Sizes in bytes, speeds in bytes a second; None where something is not there.

    versions: of what must be the same everywhere. cpus: of this rank, after the ranks of the node have shared
    them out; `cpu_count`: of the machine. domains: the NUMA domains these are in. copy_speed: read plus
    write, with all ranks of the node at it. read_speed: of the model's files, on one rank of each node.
    device_error: why there is no device.
    """

    rank: int
    host: str
    node: int
    versions: dict[str, str]
    threading: str
    launcher: str
    local_rank: int | None
    cpu_count: int
    cpus: str
    shares_cpus: bool
    threads: int
    domains: list[int]
    load: float
    device: str
    device_error: str | None
    memory: int | None
    memory_free: int | None
    shm: int
    shm_free: int
    cupy: str | None
    nccl: str | None
    copy_speed: float = 0.0
    read_speed: float | None = None


def find_facts(node: Group, node_number: int, wanted_device: str, share_devices: bool) -> RankFacts:
    """This rank's facts, without speeds. Binds it to its cores and device, as a run would. Collective over
    the node."""
    import torch

    load = os.getloadavg()[0]
    device_error = None
    try:
        device = take_device(node, wanted_device, share_devices)
    except UserError as error:
        device, device_error = "none", str(error)
    if device.startswith("cuda"):
        device += f" ({torch.cuda.get_device_name()})"
    threads = bind_cores(node)
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    everyones: list[set[int]] = node.all_gather_objects(cpus)
    topology = Topology.read(read_text)
    launch = find_launch(os.environ)
    shm = os.statvfs(ledger_folder())
    cupy, nccl = _find_cupy()
    memory = _memory()
    return RankFacts(
        rank=MPI.COMM_WORLD.rank,
        host=socket.gethostname(),
        node=node_number,
        versions=find_versions(),
        threading=_THREADING.get(MPI.Query_thread(), "unknown"),
        launcher="none" if launch is None else launch.launcher,
        local_rank=None if launch is None else launch.local_rank,
        cpu_count=os.cpu_count() or 1,
        cpus=format_cpus(frozenset(cpus)),
        shares_cpus=sum(bool(cpus & other) for other in everyones) > 1,
        threads=threads,
        domains=[number for number, domain in enumerate(topology.domains) if domain & cpus],
        load=load,
        device=device,
        device_error=device_error,
        memory=memory.get("MemTotal"),
        memory_free=memory.get("MemAvailable"),
        shm=shm.f_blocks * shm.f_frsize,
        shm_free=shm.f_bavail * shm.f_frsize,
        cupy=cupy,
        nccl=nccl,
    )


def find_versions() -> dict[str, str]:
    """Versions of Python, the MPI library and the packages that are installed."""
    vendor, numbers = MPI.get_vendor()
    versions = {"python": platform.python_version(), "MPI": f"{vendor} {'.'.join(map(str, numbers))}"}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def measure_copy(threads: int) -> float:
    """Bytes a second of copying in memory, read and write counted."""
    import torch

    torch.set_num_threads(threads)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    best, began = 0.0, time.perf_counter()
    while time.perf_counter() - began < _COPY_S:
        started = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * _COPY_BYTES / (time.perf_counter() - started))
    return best


def measure_read(model: Path, part: int, parts: int) -> float | None:
    """Bytes a second of reading this part of the model's largest file from storage, not from memory; None
    where there is no file to speak of."""
    files = [path for path in (model.iterdir() if model.is_dir() else [model]) if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is None:
        return None
    size = largest.stat().st_size
    start, stop = size * part // parts, size * (part + 1) // parts
    stop = min(stop, start + _READ_BYTES)
    if stop - start < 1 << 20:
        return None
    fd = os.open(largest, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):  # forget what is in memory of this span
            os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        at = start
        while at < stop:
            at += len(os.pread(fd, min(_PIECE_BYTES, stop - at), at))
        return (stop - start) / (time.perf_counter() - began)
    finally:
        os.close(fd)


def _find_cupy() -> tuple[str | None, str | None]:
    version = None
    for name in _CUPY:
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
    if version is None:
        return None, None
    from spmd.comm.nccl_library import load_nccl

    load_nccl()
    try:
        from cupy.cuda import nccl

        return version, str(nccl.get_version())
    except Exception as error:  # a library that it needs may be missing in many ways
        return version, f"cannot be loaded: {error}"


def _memory() -> Mapping[str, int]:
    found = {}
    for line in (read_text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = int(rest.split()[0]) << 10
    return found
