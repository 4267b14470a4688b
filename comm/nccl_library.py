"""All that GPU collectives need of CuPy, NCCL and torch's streams, in one object that tests can replace."""

from __future__ import annotations

import importlib.util
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spmd.comm.cuda_one_shot import OneShotRuntime

_WARM_UP, _REPEATS = 5, 30


class DataType(IntEnum):
    """`ncclDataType_t` of nccl.h."""

    int8 = 0
    uint8 = 1
    int32 = 2
    int64 = 4
    float16 = 6
    float32 = 7
    float64 = 8
    bfloat16 = 9


class Reduction(IntEnum):
    """`ncclRedOp_t` of nccl.h."""

    sum = 0
    max = 2


class Communicator(Protocol):
    """`cupy.cuda.nccl.NcclCommunicator`, with its names: buffers are addresses in device memory, `stream` is
    a `cudaStream_t`, and counts are elements of `datatype`. Nothing waits for the device."""

    def allReduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None: ...

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None: ...

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None: ...

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None: ...

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None: ...

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...

    def check_async_error(self) -> None:
        """Raises what went wrong since the last call, on this rank or on another."""

    def abort(self) -> None: ...

    def destroy(self) -> None: ...


class Mark(Protocol):
    """`torch.cuda.Event`: a point in a stream."""

    def query(self) -> bool: ...


class Stream(Protocol):
    """`torch.cuda.Stream`."""

    @property
    def cuda_stream(self) -> int: ...

    def record_event(self) -> Mark: ...

    def wait_event(self, event: Any) -> None: ...


class NcclLibrary(Protocol):
    """Where communicators and streams come from."""

    def use_device(self, device: torch.device) -> None:
        """Make it the calling thread's device."""

    def card(self, device: torch.device) -> str:
        """What tells the GPUs of a node apart: the PCI address. NCCL refuses two ranks with one."""

    def unique_id(self) -> object: ...

    def communicator(self, size: int, unique_id: object, rank: int) -> Communicator:
        """Blocks until `size` ranks have called it with one id."""

    def group_start(self) -> None: ...

    def group_end(self) -> None: ...

    def current_stream(self, device: torch.device) -> Stream: ...

    def new_stream(self, device: torch.device) -> Stream: ...

    def keep(self, x: Tensor, stream: Stream) -> None:
        """Leave `x`'s memory to nobody else before `stream` is done with it."""

    def measure(self, device: torch.device, call: Callable[[], None]) -> float:
        """Seconds that the device takes for what `call` queues, of many in a row. Waits for the device."""

    def one_shot_runtime(self, device: torch.device) -> OneShotRuntime: ...


class CupyLibrary:
    """The real one. Raises `ImportError`, saying what to install, where CuPy or NCCL is missing."""

    def __init__(self) -> None:
        load_nccl()
        try:
            import cupy
            from cupy.cuda import nccl
        except Exception as error:  # a library that it needs may be missing in many ways
            raise ImportError(f"CuPy cannot be loaded ({error}); {_INSTALL}") from error
        if not getattr(nccl, "available", False):
            raise ImportError("CuPy finds no NCCL; pip install nvidia-nccl-cu12 (or -cu13)")
        self._cupy = cupy
        self._nccl = nccl

    def use_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self._cupy.cuda.Device(device.index or 0).use()

    def card(self, device: torch.device) -> str:
        return str(self._cupy.cuda.runtime.deviceGetPCIBusId(device.index or 0))

    def unique_id(self) -> object:
        return self._nccl.get_unique_id()

    def communicator(self, size: int, unique_id: object, rank: int) -> Communicator:
        return cast(Communicator, self._nccl.NcclCommunicator(size, unique_id, rank))

    def group_start(self) -> None:
        self._nccl.groupStart()

    def group_end(self) -> None:
        self._nccl.groupEnd()

    def current_stream(self, device: torch.device) -> Stream:
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)

    def keep(self, x: Tensor, stream: Stream) -> None:
        x.record_stream(cast(torch.cuda.Stream, stream))

    def measure(self, device: torch.device, call: Callable[[], None]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_WARM_UP):
            call()
        began.record()
        for _ in range(_REPEATS):
            call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1000 / _REPEATS

    def one_shot_runtime(self, device: torch.device) -> OneShotRuntime:
        from spmd.comm.cuda_runtime import CupyRuntime

        return CupyRuntime(device)


_INSTALL = "pip install 'spmd[cuda12]' or 'spmd[cuda13]', after the major version of torch's CUDA"


def find_library() -> tuple[NcclLibrary | None, str]:
    """The library, or None and why there is none."""
    if importlib.util.find_spec("cupy") is None:
        return None, f"CuPy is not installed; {_INSTALL}"
    try:
        return CupyLibrary(), ""
    except ImportError as error:
        return None, str(error)


def find_problem(
    ranks: Sequence[int], nodes: Sequence[int], found: Sequence[tuple[str, str, str]]
) -> str | None:
    """Why the ranks cannot have an NCCL communicator, or None.

    nodes: of each rank, by number. found: of each rank, its host, its GPU by `NcclLibrary.card`, and what it
    lacks; one of the last two is "".
    """
    for rank, (host, _, lacks) in zip(ranks, found):
        if lacks:
            return f"rank {rank} on {host}: {lacks}"
    owners: dict[tuple[int, str], int] = {}
    for rank, node, (host, card, _) in zip(ranks, nodes, found):
        other = owners.setdefault((node, card), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} share the GPU {card} of {host}, and NCCL wants one a rank; start "
                "no more ranks a node than it has GPUs"
            )
    return None


def load_nccl() -> None:
    """Load NCCL from where pip puts it, before CuPy is imported, which asks the system's loader only. A torch
    that has loaded it already is no matter: there is one per process."""
    import ctypes
    from contextlib import suppress
    from pathlib import Path

    spec = None
    with suppress(ImportError):
        spec = importlib.util.find_spec("nvidia.nccl")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "lib" / "libnccl.so.2"
        if path.exists():
            with suppress(OSError):
                ctypes.CDLL(str(path))  # found by its name from now on
