"""Collectives on all GPUs of a node against arithmetic: a check of gpu.py, which starts it under mpirun.

    mpirun -n 2 python bench/gpu_ranks.py [--self-test]

Every number is a small integer, so that sums are exact in every type and order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from gpu_kernels import seconds
from mpi4py import MPI
from torch import Tensor

from spmd.comm.group import Group
from spmd.launch.devices import device_taker
from spmd.launch.start import start_grid

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 1000, 4096, 65536, 1 << 20]


def rows_of(rank: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What rank `rank` contributes: [rank + 1, rank + 2, ...] modulo 7."""
    return ((torch.arange(count, device=device) + rank + 1) % 7).to(dtype)


def total(ranks: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return sum((rows_of(rank, count, device, torch.float32) for rank in range(ranks)), torch.zeros(())).to(
        dtype
    )


def check_sums(group: Group, device: torch.device) -> None:
    for dtype in DTYPES:
        for count in SIZES:
            x = rows_of(group.rank, count, device, dtype)
            expect("all_reduce", group.all_reduce(x), total(group.size, count, device, dtype))


def check_parts(group: Group, device: torch.device) -> None:
    """Uneven parts, one of them empty where there are more than two ranks."""
    sizes = [3 if rank == 0 else 0 if rank == 2 else 5 for rank in range(group.size)]
    mine = rows_of(group.rank, sizes[group.rank] * 8, device, torch.bfloat16).view(-1, 8)
    parts = [rows_of(rank, size * 8, device, torch.bfloat16).view(-1, 8) for rank, size in enumerate(sizes)]
    expect("all_gather", group.all_gather(mine, sizes), torch.cat(parts))
    whole = rows_of(group.rank, sum(sizes) * 8, device, torch.float32).view(-1, 8)
    summed = total(group.size, sum(sizes) * 8, device, torch.float32).view(-1, 8).split(sizes)[group.rank]
    expect("reduce_scatter", group.reduce_scatter(whole, sizes), summed)
    root = group.size - 1
    x = rows_of(group.rank, 100, device, torch.int64)
    expect("broadcast", group.broadcast(x, root), rows_of(root, 100, device, torch.int64))


def check_messages(group: Group, device: torch.device) -> None:
    """Round the ring, several under way at once."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    group.open_messages(
        [(rank, (rank + 1) % group.size, tag) for rank in range(group.size) for tag in (10, 11)]
    )
    incoming = [torch.zeros(5000, dtype=torch.bfloat16, device=device) for _ in range(2)]
    receives = [group.irecv(x, before, tag) for x, tag in zip(incoming, (10, 11))]
    sends = [
        group.isend(rows_of(group.rank + tag, 5000, device, torch.bfloat16), after, tag) for tag in (10, 11)
    ]
    for receive, tag in zip(receives, (10, 11)):
        expect("message", receive.wait(), rows_of(before + tag, 5000, device, torch.bfloat16))
    for send in sends:
        send.wait()


def check_fused_norm(group: Group, device: torch.device) -> None:
    weight = torch.full((1024,), 2.0, dtype=torch.bfloat16, device=device)
    residual = torch.ones(4, 1024, dtype=torch.bfloat16, device=device)
    partial = torch.full((4, 1024), float(group.rank + 1), dtype=torch.bfloat16, device=device)
    normed = group.fused_all_reduce_norm(partial, residual, weight, 0.0)
    if normed is not None:  # a row of equal numbers has norm 1 everywhere
        expect("fused norm", normed, torch.full_like(normed, 2.0))
        level = 1.0 + group.size * (group.size + 1) / 2
        expect("fused residual", residual, torch.full_like(residual, level))


def check_capture(group: Group, device: torch.device) -> None:
    """Sums in a CUDA graph, replayed with other numbers."""
    if device.type != "cuda" or not group.capturable:
        return
    x = torch.zeros(4096, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        group.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        group.all_reduce(x)
        group.all_reduce(x)
    for turn in range(3):
        x.fill_(turn)
        graph.replay()
        expect("all_reduce in a graph", x, torch.full_like(x, turn * group.size**2))


def expect(what: str, found: Tensor, want: Tensor) -> None:
    if not torch.equal(found.cpu(), want.cpu()):
        raise AssertionError(f"{what} of {list(want.shape)} {want.dtype}: wrong numbers")


CHECKS: list[Callable[[Group, torch.device], None]] = [
    check_sums,
    check_parts,
    check_messages,
    check_fused_norm,
    check_capture,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    taker = None if args.self_test else device_taker("cuda")
    grid = start_grid(MPI.COMM_WORLD, tp=MPI.COMM_WORLD.size, timeout_s=120.0, take_device=taker)
    group, device = grid.tp, torch.device("cpu") if taker is None else grid.device
    failed = []
    for check in CHECKS:
        try:
            check(group, device)
        except AssertionError as error:
            failed.append(f"rank {group.rank}, {check.__name__}: {error}")
    failed = [line for lines in group.all_gather_objects(failed) for line in lines]
    figures = {}
    for elements in (4096, 65536, 1 << 22):
        x = torch.zeros(elements, dtype=torch.bfloat16, device=device)
        took = seconds(device, lambda x=x: group.all_reduce(x))  # type: ignore[misc]
        figures[f"all_reduce of {x.nbytes} bytes, us"] = took * 1e6
    if group.rank == 0:
        detail = failed[0] if failed else f"{group.size} ranks, {group.backend}"
        print(json.dumps({"ok": not failed, "detail": detail, "figures": figures}))
    grid.free()


if __name__ == "__main__":
    main()
