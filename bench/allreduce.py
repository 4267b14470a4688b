"""Sums over the ranks of a node: MPI's, the group's, and those inside the stage kernel, by size.

    mpirun -n 2 python bench/allreduce.py [--json FILE]

Medians in microseconds, all three in turn. MPI sums fp32, as it has no bf16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from numba import carray, njit
from runner import pin_rank, print_table

from spmd.comm.group import make_group
from spmd.comm.window import WORD_BITS
from spmd.layers.kernels.cpu_rows import ints
from spmd.layers.kernels.cpu_sync import cycles, store_release, wait_for_word
from spmd.layers.kernels.simd import f32_pointer

SIZES = [512, 1024, 2048, 8192, 32768, 131072]


@njit(nogil=True)
def sum_inside(x: int, count: int, window: int, times: int, durations: int) -> bool:
    """`times` sums of `count` fp32 numbers, as the stage kernel does them: written to the shared slot,
    published, added. window: address of (ranks, rank, words, slots, sequence, check). durations: cycles."""
    size, rank, words, slots, sequence, check = ints(window, 6)
    values = carray(f32_pointer(x), count)
    took = ints(durations, times)
    table = ints(words, size)
    for turn in range(times):
        began = cycles()
        slot = ints(slots + 8 * size * ((sequence + 1) & 1), size)
        part = carray(f32_pointer(slot[rank]), count)
        for i in range(count):
            part[i] = values[i]
        sequence += 1
        mine = ints(table[rank], 3)
        mine[1], mine[2] = 4 * count, 0
        store_release(table[rank], (sequence << WORD_BITS) | check)
        while not wait_for_word(words, size, (sequence << WORD_BITS) | check):
            pass
        for i in range(count):
            values[i] = 0
        for other in range(size):
            part = carray(f32_pointer(slot[other]), count)
            for i in range(count):
                values[i] += part[i]
        took[turn] = cycles() - began
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    pin_rank(world.rank, world.size)
    torch.set_num_threads(1)
    group = make_group(world, "shm")
    cycles_now()  # compile
    began, ticks = time.perf_counter(), cycles_now()
    time.sleep(0.05)
    per_us = (cycles_now() - ticks) / (time.perf_counter() - began) / 1e6

    rows, results = [], []
    for count in SIZES:
        wide, narrow = torch.zeros(count), torch.zeros(count, dtype=torch.bfloat16)
        array = wide.numpy()
        row = {
            "elements": count,
            "mpi_fp32": median_us(lambda: world.Allreduce(MPI.IN_PLACE, array), args.times),  # noqa: B023
            "group_fp32": median_us(lambda: group.all_reduce(wide), args.times),  # noqa: B023
            "group_bf16": median_us(lambda: group.all_reduce(narrow), args.times),  # noqa: B023
        }
        window = group.reduction_window(4 * count)
        if window is not None:
            fields = [window.size, window.rank, window.words, window.slots, window.sequence, window.check]
            table, took = np.array(fields, dtype=np.int64), np.zeros(args.times, dtype=np.int64)
            sum_inside(wide.data_ptr(), 0, table.ctypes.data, 0, took.ctypes.data)  # compile
            world.Barrier()
            sum_inside(wide.data_ptr(), count, table.ctypes.data, args.times, took.ctypes.data)
            window.close(window.sequence + args.times, 0.0)
            row["kernel_fp32"] = float(np.median(took)) / per_us
        results.append(row)
        rows.append(list(row.values()))
    if world.rank == 0:
        print_table(["elements", "MPI fp32", "group fp32", "group bf16", "in kernel fp32"], rows)
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=2))


@njit(nogil=True)
def cycles_now() -> int:
    return cycles()


def median_us(call: Callable[[], object], times: int) -> float:
    for _ in range(20):
        call()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)) * 1e6


if __name__ == "__main__":
    main()
