"""What the one-shot kernel needs of CUDA, through CuPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from spmd.comm.cuda_one_shot import Kernel


class CupyRuntime:
    """Memory that processes of a node share by CUDA IPC, and kernels compiled when they are needed."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._number = device.index or 0

    def can_reach(self, card: str) -> bool:
        try:
            other = self._runtime.deviceGetByPCIBusId(card)
        except self._runtime.CUDARuntimeError:
            return True  # hidden from this process; opening its memory will tell
        return bool(self._runtime.deviceCanAccessPeer(self._number, other))

    def allocate(self, size: int) -> int:
        # Not from a pool: a handle is for a whole allocation.
        address = int(self._runtime.malloc(size))
        self._runtime.memset(address, 0, size)
        self._runtime.deviceSynchronize()
        return address

    def free(self, address: int) -> None:
        self._runtime.free(address)

    def export(self, address: int) -> bytes:
        return bytes(self._runtime.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        return int(self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))

    def close(self, address: int) -> None:
        self._runtime.ipcCloseMemHandle(address)

    def compile(self, source: str, ranks: int) -> Callable[[str], Kernel]:
        module = self._cupy.RawModule(code=source, options=compile_options(ranks))
        streams: dict[int, Any] = {}

        def find(name: str) -> Kernel:
            function = module.get_function(name)

            def launch(blocks: int, threads: int, arguments: Sequence[Any], stream: int) -> None:
                outer = streams.get(stream)
                if outer is None:
                    with warnings.catch_warnings():  # its successor is not in CuPy 13
                        warnings.simplefilter("ignore", DeprecationWarning)
                        outer = streams[stream] = self._cupy.cuda.ExternalStream(stream)
                with outer:
                    function((blocks,), (threads,), tuple(arguments))

            return launch

        return find


def compile_options(ranks: int) -> tuple[str, ...]:
    """For one_shot.cu, to NVRTC."""
    return ("-std=c++17", f"-DRANKS={ranks}")
