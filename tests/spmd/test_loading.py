"""Ranks that load together: their memory, and what happens when one cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.models import add_tokenizer, build
from support.mpirun import mpirun

LAYERS, ROWS, COLUMNS = 12, 2048, 3000  # 147 MB in bf16

# Grows from before the load to its peak, of memory that is resident; and what is held in the end.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from mpi4py import MPI
from spmd.checkpoint import load_plan
from spmd.checkpoint.cooperative import CooperativeWeights, Request
from spmd.checkpoint.safetensors_source import SafetensorsSource
from spmd.comm.grid import Grid

load_plan.PIECE_BYTES, load_plan.READ_BYTES, load_plan.ARRIVING_BYTES = 1 << 20, 2 << 20, 8 << 20
torch.set_num_threads(1)

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

grid = Grid.create(MPI.COMM_WORLD, tp=2, pp=2)
source = SafetensorsSource(Path(sys.argv[1]))
names = source.names()
mine = names[: len(names) // 2] if grid.pp_rank == 0 else names[len(names) // 2 :]
rows, columns = source.shape(names[0])
halves = [(0, 1000), (1000, rows)], [(0, 1400), (1400, columns)]
requests = []
for number, name in enumerate(mine):  # rows of one, columns of the next, every third as another type
    bounds = (halves[0][grid.tp_rank], (0, columns)) if number % 2 else ((0, rows), halves[1][grid.tp_rank])
    requests.append(Request(name, bounds, None if number % 3 else torch.float16))
grid.world.barrier()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = status("VmRSS")
weights = CooperativeWeights(source, grid, requests)
with weights:
    kept = [
        weights.get(r.name, source.shape(r.name), tuple(slice(*b) for b in r.bounds), r.dtype)
        for r in requests
    ]
found = {"peak": status("VmHWM") - before, "shard": sum(tensor.nbytes for tensor in kept)}
found["read"] = weights.exchange.files.bytes_read
gathered = grid.world.gather_objects(found)
if grid.rank == 0:
    print(json.dumps(gathered))
"""


def test_a_rank_holds_its_shard_and_little_more(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    tensors = {
        f"layer.{number}": torch.randint(-9, 9, (ROWS, COLUMNS), generator=made).bfloat16()
        for number in range(LAYERS)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    tensors.clear()
    done = mpirun(4, ["-c", SCRIPT, str(tmp_path)])
    assert done.code == 0, done.output
    ranks = json.loads(done.stdout.splitlines()[-1])
    assert sum(rank["read"] for rank in ranks) == size
    for rank in ranks:
        # 2 MB read, as much packed for others, 8 MB arriving, and room for the allocators of Python and MPI.
        assert rank["peak"] <= rank["shard"] + (2 + 2 + 8 + 16 << 20), ranks
        assert rank["shard"] < size / 3  # so that a rank that held all of it would be found


BAD_DISK = """
import errno, sys
from mpi4py import MPI
from spmd.checkpoint import file_reader
from spmd.run import cli

class BadDisk(file_reader.FileIO):
    def readinto(self, buffer):
        if MPI.COMM_WORLD.rank == 2:
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(buffer)

file_reader.FileIO = BadDisk
cli()
"""


def test_what_one_rank_cannot_read_ends_the_job(tmp_path: Path) -> None:
    build(tmp_path, num_hidden_layers=2)
    add_tokenizer(tmp_path, 131)
    arguments = ["--model", str(tmp_path), "--tp", "3", "--kernels", "torch", "--prompt", "w6"]
    done = mpirun(3, ["-c", BAD_DISK, *arguments])
    assert done.code == 2, done.output
    assert done.stderr.count(f"spmd: error: rank 2: {tmp_path / 'model.safetensors'} can't be read") == 1
    assert "Input/output error" in done.stderr
    assert "Traceback" not in done.stderr, done.output
    assert done.seconds < 60, done.output
