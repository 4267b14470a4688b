"""A stand-in for CuPy's NCCL on tensors in host memory, to run the code around NCCL without a GPU.

Its collectives are real, over MPI, on the addresses they are given, so results over several ranks can be
checked; and it writes down every call with its arguments. It is as strict as NCCL or stricter: ranks whose
calls do not match are told, what is in a group is done at the group's end, what is on a stream other than
the current one is only there for who waits for it, and the first message from one rank to another holds each
up until the other has made its call. It shows nothing of NCCL's own speed, order of additions or need of
memory, nor that a GPU's streams behave as these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from spmd.comm.nccl_library import DataType, Reduction

TYPES = {getattr(torch, kind.name): kind for kind in DataType}
DTYPES = {kind: dtype for dtype, kind in TYPES.items()}
CURRENT_STREAM = 7
_TAG = 20000
_CONNECT = 100  # and the sender: tags of a communicator's own
_CONNECT_S = 30.0


class StandInError(RuntimeError):
    """In the place of `cupy.cuda.nccl.NcclError`."""


@dataclass(frozen=True)
class Call:
    """One call. communicator: by the order of being made on this rank; arguments as NCCL got them."""

    name: str
    arguments: tuple[Any, ...] = ()
    communicator: int | None = None


@dataclass
class Mark:
    """A point in a stream: what was on its way there."""

    stream: int
    requests: list[MPI.Request]

    def query(self) -> bool:
        return all(request.Test() for request in self.requests)


@dataclass
class StandInStream:
    """The current stream does everything at once, as the host does; another has messages on their way."""

    cuda_stream: int
    log: Callable[[Call], None]
    requests: list[MPI.Request] = field(default_factory=list)

    def record_event(self) -> Mark:
        self.log(Call("record", (self.cuda_stream,)))
        return Mark(self.cuda_stream, list(self.requests))

    def wait_event(self, event: Mark) -> None:
        self.log(Call("wait", (self.cuda_stream, event.stream)))
        if self.cuda_stream == CURRENT_STREAM:
            while not event.query():
                time.sleep(0.0005)


class RecordingNccl:
    """An `NcclLibrary`. Made by all ranks of the world together.

    fail_id, fail_join, wrong_sums: ranks of the world where making ids and joining communicators raise, and
    where sums come out wrong. others_hang: who joins a communicator with a failed rank waits for ever.
    """

    def __init__(
        self,
        fail_id: Sequence[int] = (),
        fail_join: Sequence[int] = (),
        wrong_sums: Sequence[int] = (),
        card: str | None = None,
    ) -> None:
        self.world = MPI.COMM_WORLD.Dup()
        self.calls: list[Call] = []
        self.streams: dict[int, StandInStream] = {}
        self.communicators: list[StandInCommunicator] = []
        self.kept: list[tuple[int, int]] = []
        self.async_error: str | None = None
        self.runtime: Any = None
        self.speed: Callable[[], float] | None = None
        self.fail_id = self.world.rank in fail_id
        self.fail_join = self.world.rank in fail_join
        self.wrong_sums = self.world.rank in wrong_sums
        self.given_up = threading.Event()
        self._card = f"0000:{self.world.rank:02x}:00.0" if card is None else card
        self._ids = 0
        self._group: list[Callable[[], None]] | None = None

    def use_device(self, device: torch.device) -> None:
        self.calls.append(Call("use_device", (str(device), threading.current_thread().name)))

    def card(self, device: torch.device) -> str:
        return self._card

    def unique_id(self) -> object:
        self.calls.append(Call("unique_id"))
        if self.fail_id:
            raise StandInError("no network interface")
        self._ids += 1
        return self.world.rank, self._ids

    def communicator(self, size: int, unique_id: Any, rank: int) -> StandInCommunicator:
        self.calls.append(Call("communicator", (size, unique_id, rank)))
        if self.fail_join:
            raise StandInError("out of memory")
        comm = self._assemble(size, unique_id, rank)
        made = StandInCommunicator(self, comm, len(self.communicators), unique_id)
        self.communicators.append(made)
        return made

    def group_start(self) -> None:
        assert self._group is None, "groups are not nested here"
        self.calls.append(Call("group_start"))
        self._group = []

    def group_end(self) -> None:
        assert self._group is not None, "the end of a group that was not started"
        self.calls.append(Call("group_end"))
        queued, self._group = self._group, None
        for work in queued:
            work()

    def current_stream(self, device: torch.device) -> StandInStream:
        return self.streams.setdefault(CURRENT_STREAM, StandInStream(CURRENT_STREAM, self.calls.append))

    def new_stream(self, device: torch.device) -> StandInStream:
        number = 100 + len(self.streams)
        self.streams[number] = StandInStream(number, self.calls.append)
        return self.streams[number]

    def keep(self, x: Tensor, stream: StandInStream) -> None:
        self.kept.append((x.data_ptr(), stream.cuda_stream))

    def measure(self, device: torch.device, call: Callable[[], None]) -> float:
        call()
        return 1.0 if self.speed is None else self.speed()

    def one_shot_runtime(self, device: torch.device) -> Any:
        if self.runtime is None:
            raise StandInError("no CUDA")
        return self.runtime

    def take_calls(self) -> list[Call]:
        """The calls since the last time."""
        calls, self.calls[:] = list(self.calls), []
        return calls

    def give_up(self) -> None:
        """Free threads that wait for a rank that has failed; NCCL has no such thing."""
        self.given_up.set()

    def do(self, work: Callable[[], None]) -> None:
        if self._group is None:
            work()
        else:
            self._group.append(work)

    def _assemble(self, size: int, unique_id: tuple[int, int], rank: int) -> MPI.Intracomm:
        """The members of a communicator find each other by its id alone, as NCCL's do."""
        maker, serial = unique_id
        tag = _TAG + serial
        if self.world.rank == maker:
            members = {rank: maker}
            while len(members) < size:
                self._wait(MPI.ANY_SOURCE, tag)
                place, member = self.world.recv(source=MPI.ANY_SOURCE, tag=tag)
                assert place not in members, f"two ranks say they are rank {place} of {unique_id}"
                members[place] = member
            order = [members[place] for place in range(size)]
            for member in order:
                if member != maker:
                    self.world.send(order, member, tag)
        else:
            self.world.send((rank, self.world.rank), maker, tag)
            self._wait(maker, tag)
            order = self.world.recv(source=maker, tag=tag)
        return self.world.Create_group(self.world.Get_group().Incl(order), tag)

    def _wait(self, source: int, tag: int) -> None:
        while not self.world.Iprobe(source, tag):
            if self.given_up.is_set():
                raise StandInError("given up by the test")
            time.sleep(0.001)


class StandInCommunicator:
    """A `Communicator`."""

    def __init__(
        self, library: RecordingNccl, comm: MPI.Intracomm, number: int, unique_id: tuple[int, int]
    ) -> None:
        self.library = library
        self.comm = comm
        self.number = number
        self.unique_id = unique_id
        self.state = "open"
        self.connected: set[tuple[int, int]] = set()

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._note("allReduce", (sendbuf, recvbuf, count, int(datatype), int(op), stream))

        def work() -> None:
            self._agree("allReduce", count, datatype, op)
            _tensor(recvbuf, count, datatype).copy_(self._combined(sendbuf, count, datatype, op))

        self.library.do(work)

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        self._note("reduce", (sendbuf, recvbuf, count, int(datatype), int(op), root, stream))

        def work() -> None:
            self._agree("reduce", count, datatype, op, root)
            combined = self._combined(sendbuf, count, datatype, op)
            if self.comm.rank == root:
                _tensor(recvbuf, count, datatype).copy_(combined)

        self.library.do(work)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        self._note("reduceScatter", (sendbuf, recvbuf, recvcount, int(datatype), int(op), stream))

        def work() -> None:
            self._agree("reduceScatter", recvcount, datatype, op)
            combined = self._combined(sendbuf, recvcount * self.comm.size, datatype, op)
            _tensor(recvbuf, recvcount, datatype).copy_(combined.split(recvcount)[self.comm.rank])

        self.library.do(work)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._note("allGather", (sendbuf, recvbuf, count, int(datatype), stream))

        def work() -> None:
            self._agree("allGather", count, datatype)
            parts = self._everyones(sendbuf, count, datatype)
            _tensor(recvbuf, count * self.comm.size, datatype).copy_(torch.cat(parts))

        self.library.do(work)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._note("broadcast", (sendbuff, recvbuff, count, int(datatype), root, stream))

        def work() -> None:
            self._agree("broadcast", count, datatype, root)
            into = _tensor(recvbuff, count, datatype)
            if self.comm.rank == root and sendbuff != recvbuff:
                into.copy_(_tensor(sendbuff, count, datatype))
            self.comm.Bcast([_bytes(recvbuff, count, datatype), MPI.BYTE], root)

        self.library.do(work)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._note("send", (sendbuf, count, int(datatype), peer, stream))
        self._connect(self.comm.rank, peer)
        request = self.comm.Isend([_bytes(sendbuf, count, datatype), MPI.BYTE], peer)
        self.library.streams[stream].requests.append(request)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._note("recv", (recvbuf, count, int(datatype), peer, stream))
        self._connect(peer, self.comm.rank)
        request = self.comm.Irecv([_bytes(recvbuf, count, datatype), MPI.BYTE], peer)
        self.library.streams[stream].requests.append(request)

    def check_async_error(self) -> None:
        if self.library.async_error is not None:
            raise StandInError(self.library.async_error)

    def abort(self) -> None:
        assert self.state == "open"
        self.state = "aborted"

    def destroy(self) -> None:
        assert self.state == "open"
        self.state = "destroyed"
        self.comm.Free()

    def _connect(self, source: int, target: int) -> None:
        """The first time, wait on the host until the other end makes the call that matches."""
        if (source, target) in self.connected:
            return
        self.connected.add((source, target))
        peer, tag, nothing = source + target - self.comm.rank, _CONNECT + source, bytearray(0)
        requests = [self.comm.Isend(nothing, peer, tag), self.comm.Irecv(nothing, peer, tag)]
        deadline = time.monotonic() + _CONNECT_S
        while not MPI.Request.Testall(requests):
            if time.monotonic() > deadline:
                raise StandInError(f"the first message from {source} to {target} waits for the other end")
            time.sleep(0.0005)

    def _note(self, name: str, arguments: tuple[Any, ...]) -> None:
        assert self.state == "open", f"{name} on a communicator that is {self.state}"
        self.library.calls.append(Call(name, arguments, self.number))

    def _agree(self, *what: Any) -> None:
        """NCCL hangs or computes garbage where ranks call different things; this says so."""
        everyones = self.comm.allgather(tuple(map(str, what)))
        assert len(set(everyones)) == 1, f"ranks are in different calls: {everyones}"

    def _everyones(self, address: int, count: int, datatype: int) -> list[Tensor]:
        size = _bytes(address, count, datatype)
        gathered = bytearray(len(size) * self.comm.size)
        self.comm.Allgather([size, MPI.BYTE], [gathered, MPI.BYTE])
        return list(torch.frombuffer(gathered, dtype=DTYPES[DataType(datatype)]).split(count))

    def _combined(self, address: int, count: int, datatype: int, op: int) -> Tensor:
        parts = torch.stack(self._everyones(address, count, datatype))
        if op == Reduction.max:
            return parts.amax(0)
        wide = parts.double() if parts.dtype.is_floating_point else parts
        return (wide.sum(0) + self.library.wrong_sums).to(parts.dtype)


def _bytes(address: int, count: int, datatype: int) -> MPI.buffer:
    return MPI.buffer.fromaddress(address, count * DTYPES[DataType(datatype)].itemsize)


def _tensor(address: int, count: int, datatype: int) -> Tensor:
    return torch.frombuffer(_bytes(address, count, datatype), dtype=DTYPES[DataType(datatype)])
