"""Collectives between GPUs by NCCL, through CuPy; what is in host memory goes over MPI as ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.comm.cuda_one_shot import OneShot
from spmd.comm.errors import UserError
from spmd.comm.group import Combine, Group
from spmd.comm.ledger import Ledger, Operation
from spmd.comm.nccl_library import Communicator, DataType, NcclLibrary, Reduction
from spmd.comm.nccl_messages import Channel, DeviceRecv, DeviceSend
from spmd.comm.nccl_start import open_communicators
from spmd.comm.one_shot_start import open_one_shot
from spmd.comm.pending import PendingRecv, PendingSend
from spmd.comm.reduce import max_into, sum_into
from spmd.comm.waiting import wait_until

_LOG = logging.getLogger(__name__)
_TYPES = {
    torch.int8: DataType.int8,
    torch.uint8: DataType.uint8,
    torch.int32: DataType.int32,
    torch.int64: DataType.int64,
    torch.float16: DataType.float16,
    torch.float32: DataType.float32,
    torch.float64: DataType.float64,
    torch.bfloat16: DataType.bfloat16,
}

Route = tuple[int, int, int]
"""Of messages: source, target and tag."""


class NcclGroup(Group):
    """Group whose tensors on `device` travel by NCCL, by address and on torch's current stream: the host does
    not wait, and a CUDA graph can hold the calls. The calls of one group must be ordered on the device: on
    one stream, or on streams that events order, alike on all ranks.

    NCCL adds 16-bit floats in 16 bits, in an order of its own that is the same in every run with the same
    ranks. Where there is a `one_shot` kernel it serves small sums: in rank order and in fp32, as other groups
    do. Maxima of floats keep a NaN. Types that NCCL does not know are moved as bytes; sums of them, tensors
    elsewhere, objects and barriers go through `host`, a group of the same ranks over MPI.

    Made by `NcclGroup.open`.
    """

    backend = "nccl"
    capturable = True
    # The first receive on a route waits for its sender on the host, and every one occupies the device.
    receives_early = False

    def __init__(
        self, host: Group, library: NcclLibrary, device: torch.device, communicator: Communicator
    ) -> None:
        super().__init__(host.comm, host.name, host.timeout_s)
        self.device = device
        self.one_shot: OneShot | None = None
        self._host = host
        self._library = library
        self._communicator = communicator
        self._channels: dict[Route, Channel | None] = {}  # of all routes; None where others own it
        self._lock = threading.Lock()  # the watchdog's thread asks for errors
        self._open = [communicator]
        self._fault: str | None = None

    @classmethod
    def open(cls, host: Group, library: NcclLibrary, device: torch.device) -> NcclGroup:
        """The group of the ranks of `host`, which it takes over, after a first sum has come out right.

        Collective. Raises `UserError`, the same on every rank, when NCCL fails on one.
        """
        (communicator,) = open_communicators(host, library, device, [range(host.size)])
        assert communicator is not None
        group = cls(host, library, device, communicator)
        group._check()
        return group

    def prepare_sums(self, threads: int = 512) -> None:
        """Have small sums done by a one-shot kernel, if it is right and up to the size where it is faster.

        threads: of a block of the kernel.
        """
        if self.one_shot is not None:
            return
        self.one_shot, why_not = open_one_shot(
            self._host, self._library, self.device, self._all_reduce, threads=threads
        )
        if why_not and self.rank == 0:
            _LOG.info("sums of the %s group are NCCL's at every size: %s", self.name, why_not)

    def open_messages(self, routes: Sequence[Route]) -> None:
        """From now on tensors on the device go by NCCL on these routes. All other messages go over MPI."""
        fresh = [route for route in routes if route not in self._channels and route[0] != route[1]]
        made = open_communicators(self._host, self._library, self.device, [route[:2] for route in fresh])
        for route, communicator in zip(fresh, made):
            self._channels[route] = None
            if communicator is not None:
                peer = 1 if self.rank == route[0] else 0
                self._channels[route] = Channel(self._library, self.device, communicator, peer)
                with self._lock:
                    self._open.append(communicator)

    def record_in(self, ledger: Ledger) -> None:
        super().record_in(ledger)
        ledger.checks.append(self.find_fault)

    def find_fault(self) -> str | None:
        """What NCCL reports of this rank or of others since; the communicators are aborted then, so that no
        kernel waits for ever. For any thread."""
        with self._lock:
            for communicator in self._open if self._fault is None else ():
                try:
                    communicator.check_async_error()
                except Exception as error:
                    self._fault = f"NCCL of {self} reports {type(error).__name__}: {error}"
                    break
            if self._fault is not None:
                self._abort()
            return self._fault

    def abort(self) -> None:
        """End what is under way on the device. The group is unusable afterwards."""
        with self._lock:
            self._abort()

    def fuses_norm(self, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return self.one_shot is not None and self.one_shot.fuses_norm(rows, hidden, dtype)

    def fused_all_reduce_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor | None:
        rows, hidden = partial.shape
        one_shot = self.one_shot
        if one_shot is None or not one_shot.fuses_norm(rows, hidden, partial.dtype):
            return None
        normed = torch.empty_like(partial) if out is None else out
        size = partial.nbytes
        self._run(
            self._number,
            Operation.all_reduce,
            size,
            -1,
            False,
            one_shot.all_reduce_norm,
            partial,
            residual,
            weight,
            eps,
            normed,
            self._stream(),
        )
        return normed

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> PendingSend:
        channel = self._channel(x, (self.rank, peer, tag))
        if channel is None:
            return super().isend(x, peer, tag)
        flat = x.contiguous()
        return DeviceSend(channel, flat, channel.send(flat, *_as_sent(flat)))

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> PendingRecv:
        channel = self._channel(x, (peer, self.rank, tag))
        if channel is None:
            return super().irecv(x, peer, tag)
        flat = x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)

        def finish() -> None:
            if flat is not x:
                x.copy_(flat)

        # What a later rank sends may depend on what this one has yet to queue: a call that waits for the
        # device in between would never return.
        late = peer > self.rank
        return DeviceRecv(channel, x, lambda: channel.recv(flat, *_as_sent(flat)), finish, late)

    def barrier(self) -> None:
        self._host.barrier()

    def _serves(self, x: Tensor, reduces: bool = False) -> bool:
        return x.device == self.device and (not reduces or x.dtype in _TYPES)

    def _local(self, x: Tensor, reduces: bool = False, read: bool = True) -> Tensor:
        return x.contiguous() if self._serves(x, reduces) else super()._local(x, reduces, read)

    def _stream(self) -> int:
        return self._library.current_stream(self.device).cuda_stream

    def _reduce(self, flat: Tensor, combine: Combine) -> None:
        if not self._serves(flat, reduces=True):
            self._host._reduce(flat, combine)
            return
        count = flat.numel()
        reduction = Reduction.sum
        if combine is max_into:
            if flat.is_floating_point():  # NCCL's maximum may drop a NaN
                parts = flat.new_empty(self.size, count)
                self._all_gather(flat, [count] * self.size, parts.view(-1))
                torch.amax(parts, 0, out=flat)
                return
            reduction = Reduction.max
        elif self.one_shot is not None and self.one_shot.serves(flat):
            self.one_shot.all_reduce(flat, self._stream())
            return
        self._all_reduce(flat, reduction)

    def _all_reduce(self, flat: Tensor, reduction: Reduction = Reduction.sum) -> None:
        address = flat.data_ptr()
        self._communicator.allReduce(
            address, address, flat.numel(), _TYPES[flat.dtype], reduction, self._stream()
        )

    def _all_gather(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        if not self._serves(out):
            self._host._all_gather(flat, counts, out)
            return
        datatype, factor = _wire_type(out.dtype)
        stream = self._stream()
        if len(set(counts)) == 1:
            self._communicator.allGather(
                flat.data_ptr(), out.data_ptr(), counts[0] * factor, datatype, stream
            )
            return
        self._library.group_start()
        for root, part in enumerate(out.split(list(counts))):
            if part.numel():
                source = flat if root == self.rank else part
                self._communicator.broadcast(
                    source.data_ptr(), part.data_ptr(), counts[root] * factor, datatype, root, stream
                )
        self._library.group_end()

    def _reduce_scatter(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        if not self._serves(flat, reduces=True):
            self._host._reduce_scatter(flat, counts, out)
            return
        datatype, stream = _TYPES[flat.dtype], self._stream()
        if len(set(counts)) == 1:
            self._communicator.reduceScatter(
                flat.data_ptr(), out.data_ptr(), counts[0], datatype, Reduction.sum, stream
            )
            return
        self._library.group_start()
        for root, part in enumerate(flat.split(list(counts))):
            if part.numel():
                target = out if root == self.rank else part
                self._communicator.reduce(
                    part.data_ptr(), target.data_ptr(), counts[root], datatype, Reduction.sum, root, stream
                )
        self._library.group_end()

    def _broadcast(self, flat: Tensor, root: int) -> None:
        if not self._serves(flat):
            self._host._broadcast(flat, root)
            return
        datatype, factor = _wire_type(flat.dtype)
        address = flat.data_ptr()
        self._communicator.broadcast(address, address, flat.numel() * factor, datatype, root, self._stream())

    def _channel(self, x: Tensor, route: Route) -> Channel | None:
        self._check_peer(route[1] if route[0] == self.rank else route[0], route[2])
        return self._channels.get(route) if self._serves(x) else None

    def _check(self) -> None:
        """A sum with a known result, so that a broken link shows before there is work to lose."""
        x = torch.arange(8.0, device=self.device) + self.rank
        self._reduce(x, sum_into)
        done = self._library.current_stream(self.device).record_event()
        wait_until(done.query, f"the first sum of {self}", self.timeout_s)
        expected = torch.arange(8.0) * self.size + self.size * (self.size - 1) / 2
        right = self.all_gather_objects(bool(torch.equal(x.cpu(), expected)))
        if not all(right):
            self.abort()
            wrong = ", ".join(str(self.ranks[rank]) for rank, good in enumerate(right) if not good)
            raise UserError(
                f"communication backend: nccl: a first sum over {self} came out wrong on rank {wrong}; "
                "check the links between the GPUs (NCCL_DEBUG=INFO), or use --comm-backend mpi"
            )

    def _abort(self) -> None:
        for communicator in self._open:
            communicator.abort()
        self._open.clear()

    def _free_memory(self) -> None:
        if self.one_shot is not None:
            self.one_shot.close()
        with self._lock:
            communicators, self._open = self._open, []
        for communicator in communicators:  # without the lock: NCCL may take its time, the watchdog does not
            communicator.destroy()
        self._channels.clear()
        self._host._free_memory()


def _wire_type(dtype: torch.dtype) -> tuple[DataType, int]:
    """How elements of `dtype` are moved, and as how many."""
    known = _TYPES.get(dtype)
    return (DataType.uint8, dtype.itemsize) if known is None else (known, 1)


def _as_sent(x: Tensor) -> tuple[DataType, int]:
    datatype, factor = _wire_type(x.dtype)
    return datatype, x.numel() * factor
