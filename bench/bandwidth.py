"""How fast do the cores read memory? The limit of decoding with few requests.

    mpirun -n 2 python bench/bandwidth.py

Each rank reads 256 MB of its own, over and over, with one thread, all at the same time.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from mpi4py import MPI
from runner import pin_rank

_BYTES = 256 << 20
_ROUNDS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--as-json", action="store_true")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    pin_rank(world.rank, world.size)
    data = np.ones(_BYTES // 8, dtype=np.int64)
    seconds = []
    for _ in range(_ROUNDS):
        world.Barrier()
        started = time.perf_counter()
        data.max()
        seconds.append(world.allreduce(time.perf_counter() - started, op=MPI.MAX))
    together = world.size * _BYTES / float(np.median(seconds)) / 1e9
    if world.rank == 0:
        if args.as_json:
            print(json.dumps({"ranks": world.size, "gb_per_s": together}))
        else:
            print(f"{world.size} ranks read {together:.1f} GB/s together, {together / world.size:.1f} each")


if __name__ == "__main__":
    main()
