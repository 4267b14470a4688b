"""The one-shot kernel's source on the host's threads and memory that the ranks share (one_shot_host.h)."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

COMPILER = shutil.which("g++")
_TAIL = """
#define ALL regions[0], regions[1], regions[2], regions[3], regions[4], regions[5], regions[6], regions[7]
#define RUN(NAME) \\
    extern "C" void run_all_reduce_##NAME(unsigned blocks, unsigned threads, char** regions, int rank, \\
                                          u64 slot_bytes, Pack* x, int packs) { \\
        run(blocks, threads, [=] { all_reduce_##NAME(ALL, rank, slot_bytes, x, packs); }); \\
    } \\
    extern "C" void run_all_reduce_norm_##NAME(unsigned blocks, unsigned threads, char** regions, int rank, \\
                                               u64 slot_bytes, const Pack* partial, Pack* residual, \\
                                               const Pack* weight, Pack* normed, int rows, int packs, \\
                                               float eps) { \\
        run(blocks, threads, [=] { \\
            all_reduce_norm_##NAME(ALL, rank, slot_bytes, partial, residual, weight, normed, rows, packs, \\
                                   eps); \\
        }); \\
    }
RUN(float32)
RUN(float16)
RUN(bfloat16)
"""


class HostRuntime:
    """A `OneShotRuntime`. The ranks of `comm` make it together; `folder` is one they share, in memory.

    unreachable: a card whose memory cannot be read. wrong: a kernel whose result is spoilt.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        folder: Path,
        unreachable: str | None = None,
        wrong: str | None = None,
    ) -> None:
        self.launches: list[tuple[str, int, int, int]] = []
        self._comm = comm
        self._folder = folder
        self._unreachable = unreachable
        self._wrong = wrong
        self._memory: dict[int, mmap.mmap] = {}
        self._paths: dict[int, Path] = {}

    def can_reach(self, card: str) -> bool:
        return card != self._unreachable

    def allocate(self, size: int) -> int:
        path = self._folder / f"region-{os.getpid()}-{len(self._paths)}"
        path.write_bytes(bytes(size))
        address = self.open(str(path).encode())
        self._paths[address] = path
        return address

    def free(self, address: int) -> None:
        self._paths.pop(address).unlink()
        del self._memory[address]

    def export(self, address: int) -> bytes:
        return str(self._paths[address]).encode()

    def open(self, handle: bytes) -> int:
        with Path(handle.decode()).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = memory
        return address

    def close(self, address: int) -> None:
        del self._memory[address]

    @property
    def mapped(self) -> int:
        """Regions that are not given back."""
        return len(self._memory)

    def compile(self, source: str, ranks: int) -> Callable[[str], Callable[..., None]]:
        library = self._folder / f"one-shot-{ranks}.so"
        if self._comm.rank == 0 and not library.exists():
            text = library.with_suffix(".cpp")
            header = Path(__file__).with_name("one_shot_host.h")
            text.write_text(f'#include "{header}"\n{source}\n{_TAIL}')
            command = [str(COMPILER), "-std=c++17", "-O0", "-shared", "-fPIC", "-pthread", "-w"]
            subprocess.run([*command, f"-DRANKS={ranks}", "-o", str(library), str(text)], check=True)
        self._comm.Barrier()
        loaded = ctypes.CDLL(str(library))

        def find(name: str) -> Callable[..., None]:
            function = getattr(loaded, f"run_{name}")

            def launch(blocks: int, threads: int, arguments: Sequence[Any], stream: int) -> None:
                self.launches.append((name, blocks, threads, stream))
                regions = (ctypes.c_void_p * 8)(*(int(region) for region in arguments[:8]))
                kinds = {"int32": ctypes.c_int, "uint64": ctypes.c_uint64, "float32": ctypes.c_float}
                rest = [kinds[argument.dtype.name](argument.item()) for argument in arguments[8:]]
                function(blocks, threads, regions, *rest)
                if name == self._wrong:
                    result = int(arguments[13] if "norm" in name else arguments[10])
                    ctypes.memset(result, 0x47, 4)

            return launch

        return find
