"""The one interface for communication that layers see: collectives and messages on torch tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from mpi4py import MPI
from torch import Tensor

from spmd.comm.errors import UserError
from spmd.comm.ledger import Ledger, Operation
from spmd.comm.objects import broadcast_object, gather_objects
from spmd.comm.pending import PendingRecv, PendingSend, RunWait, byte_pieces, host_copy, host_like, on_host
from spmd.comm.reduce import check_summable, max_into, sum_into
from spmd.comm.waiting import meet, wait_until
from spmd.comm.window import ReductionWindow

BACKENDS = ("auto", "shm", "mpi", "hierarchical", "nccl")
DEFAULT_TIMEOUT_S = 600.0
RESERVED_TAG = 32767  # the largest that every MPI library has; collectives made of messages use it

T = TypeVar("T")
Combine = Callable[[Tensor, Sequence[Tensor]], None]


class Group(ABC):
    """Ranks that communicate. Collectives are called by all of them in the same order, with the same shapes.

    Reductions run in rank order, 16-bit floats in fp32: every rank gets the same bits, in every run. All
    waits give the core away and raise `HangError` after `timeout_s` seconds; the group is unusable then.
    Tensors on a GPU, and non-contiguous ones, are staged through host memory.

    Attributes: `rank` and `size` in the group; `comm`, a communicator of its own; `ranks`, the
    members' ranks in the whole job; `name`, used in messages; `backend`: "single", "shm", "mpi",
    "hierarchical" or "nccl"; `capturable`: whether a CUDA graph can hold collectives of GPU tensors;
    `receives_early`: whether a receive holds nothing up, however long before its message it is posted.
    """

    backend: str
    capturable = False
    receives_early = True

    def __init__(
        self, comm: MPI.Intracomm, name: str = "group", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.comm = comm
        self.name = name
        self.timeout_s = timeout_s
        self.rank: int = comm.rank
        self.size: int = comm.size
        world, mine = MPI.COMM_WORLD.Get_group(), comm.Get_group()
        self.ranks: tuple[int, ...] = tuple(MPI.Group.Translate_ranks(mine, None, world))
        world.Free()
        mine.Free()
        self._abandoned: list[MPI.Request] = []  # MPI may still use the memory of a request that hung
        self._run: Callable[..., Any] = _run_unrecorded
        self._number = 0  # of this group in the ledger

    def record_in(self, ledger: Ledger) -> None:
        """Write this rank's collectives and waits in the group into `ledger` from now on."""
        if self.size > 1:
            self._run, self._number = ledger.run, ledger.add_group(self.name, self.ranks)
            barrier = self.barrier
            self.barrier = lambda: self._run(  # type: ignore[method-assign]
                self._number, Operation.barrier, 0, -1, False, barrier
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; returns `x`. fp64, fp32, bf16, fp16 and integers."""
        return self._run(
            self._number, Operation.all_reduce, x.nbytes, -1, False, self._reduce_in_place, x, sum_into
        )

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Element-wise maximum over ranks, in place; returns `x`. A NaN stays."""
        return self._run(
            self._number, Operation.all_reduce_max, x.nbytes, -1, False, self._reduce_in_place, x, max_into
        )

    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, of which rank r has `sizes[r]` (0 allowed).

        Any dtype. Returns a contiguous tensor (`x` itself in a group of one).
        Raises `ValueError` when `x.shape[dim]` is not `sizes[rank]`.
        """
        dim = self._checked_dim(x, sizes, dim, whole=False)
        counts, leading = _counts(x, sizes, dim)
        mine = self._local(x)
        gathered = _room_beside(mine, sum(counts))
        if gathered.numel():
            flat = mine.view(-1)
            self._run(
                self._number,
                Operation.all_gather,
                gathered.nbytes,
                -1,
                False,
                self._all_gather,
                flat,
                counts,
                gathered,
            )
        if leading == 1:
            result = gathered.view(_with(x, dim, sum(sizes)))
        else:
            parts = zip(gathered.split(counts), sizes)
            result = torch.cat([part.view(_with(x, dim, size)) for part, size in parts], dim)
        return result.to(x.device)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """Sum over ranks, of which rank r gets its `sizes[r]` slices along `dim`; `x` has `sum(sizes)` there.

        Returns a contiguous tensor (`x` itself in a group of one).
        Raises `ValueError` when the sizes do not add up.
        """
        check_summable(x.dtype)
        dim = self._checked_dim(x, sizes, dim, whole=True)
        counts, leading = _counts(x, sizes, dim)
        if leading == 1:
            flat = self._local(x, reduces=True).view(-1)
        else:
            parts = torch.cat([part.reshape(-1) for part in x.split(list(sizes), dim)])
            flat = self._local(parts, reduces=True)
        result = _room_beside(flat, counts[self.rank])
        if flat.numel():
            self._run(
                self._number,
                Operation.reduce_scatter,
                flat.nbytes,
                -1,
                False,
                self._reduce_scatter,
                flat,
                counts,
                result,
            )
        return result.view(_with(x, dim, sizes[self.rank])).to(x.device)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """The root's values on every rank, in place; returns `x`. Any dtype."""
        self._check_peer(root)
        host = self._local(x, read=self.rank == root)
        if x.numel():
            self._run(
                self._number,
                Operation.broadcast,
                x.nbytes,
                self.ranks[root],
                False,
                self._broadcast,
                host.view(-1),
                root,
            )
        if host is not x and self.rank != root:
            x.copy_(host)
        return x

    def reduction_window(self, part_bytes: int) -> ReductionWindow | None:
        """For kernels that sum fp32 parts of `part_bytes` over the ranks themselves; None where `all_reduce`
        has to be called. The group is not used for anything else until the window is closed."""
        return None

    def fuses_norm(self, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        """Whether `fused_all_reduce_norm` serves `[rows, hidden]` tensors; the same on every rank."""
        return False

    def fused_all_reduce_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor | None:
        """Add the ranks' sum of `partial` to `residual`, in place, and return its RMSNorm times `weight`, in
        `out` if given; or None, with nothing done, where `all_reduce` and a norm are to be called.

        partial, residual and out `[rows, hidden]`, weight `[hidden]`, contiguous and of one type. Values are
        rounded where the separate steps round them. `partial` stays as it is.
        """
        return None

    def prepare_sums(self) -> None:  # noqa: B027 (see NcclGroup)
        """Measure and set up what makes small sums of GPU tensors fast. Collective; sums work without."""

    def open_messages(self, routes: Sequence[tuple[int, int, int]]) -> None:  # noqa: B027 (see NcclGroup)
        """Prepare for messages of tensors on a GPU on these routes: source, target, tag. Collective, with the
        same routes on all ranks; messages work without, if slowly."""

    def wait_device(self, event: Any) -> None:
        """`event.synchronize()`, for a `torch.cuda.Event`. Meanwhile the ledger shows that this rank waits
        for its device, which may wait for the group's other ranks."""
        self._run(self._number, Operation.device_wait, 0, -1, False, event.synchronize)

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank of the group has called it."""

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> PendingSend:
        """Start sending `x` to rank `peer` of the group.

        Keep the handle, and leave `x` unchanged, until it is done.
        Messages between two ranks with one tag arrive in the order they were sent.
        """
        self._check_peer(peer, tag)
        host = x if on_host(x) else host_copy(x)
        requests = [self.comm.Isend(piece, peer, tag) for piece in byte_pieces(host)]
        what = f"send to {self._describe(peer)}, tag {tag}"
        return PendingSend(requests, host, what, self.timeout_s, self._recorded_wait(Operation.send, x, peer))

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> PendingRecv:
        """Start receiving into `x` from rank `peer` of the group. Keep the handle until it is done."""
        self._check_peer(peer, tag)
        host = x if on_host(x) else host_like(x)
        requests = [self.comm.Irecv(piece, peer, tag) for piece in byte_pieces(host)]
        what = f"receive from {self._describe(peer)}, tag {tag}"
        return PendingRecv(
            requests, x, host, what, self.timeout_s, self._recorded_wait(Operation.recv, x, peer)
        )

    def send(self, x: Tensor, peer: int, tag: int = 0) -> None:
        """Send and wait until `x` may be reused."""
        self.isend(x, peer, tag).wait()

    def recv(self, x: Tensor, peer: int, tag: int = 0) -> Tensor:
        """Receive into `x`, wait for it and return it."""
        return self.irecv(x, peer, tag).wait()

    def broadcast_object(self, obj: Any, root: int = 0, timeout_s: float | None = None) -> Any:
        """The root's picklable `obj` on every rank (the root gets the very object it gave).

        `timeout_s` replaces the group's limit: `math.inf` on ranks that idle until there is news.
        """
        self._check_peer(root)
        what = f"broadcast of an object from {self._describe(root)}"
        return self._run(
            self._number,
            Operation.broadcast_object,
            0,
            self.ranks[root],
            timeout_s == math.inf,
            broadcast_object,
            self.comm,
            obj,
            root,
            lambda request: self._wait(request, what, timeout_s),
        )

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Every rank's picklable `obj`, in rank order, on `root`; None elsewhere."""
        self._check_peer(root)
        what = f"gather of objects to {self._describe(root)}"
        return self._run(
            self._number,
            Operation.gather_objects,
            0,
            self.ranks[root],
            False,
            gather_objects,
            self.comm,
            obj,
            root,
            lambda request: self._wait(request, what),
        )

    def all_gather_objects(self, obj: Any) -> list[Any]:
        """Every rank's picklable `obj`, in rank order, on every rank."""
        return self._run(
            self._number,
            Operation.all_gather_objects,
            0,
            -1,
            False,
            gather_objects,
            self.comm,
            obj,
            None,
            lambda request: self._wait(request, "all_gather_objects"),
        )

    def free(self) -> None:
        """Give back the communicator. Collective; the group is unusable afterwards."""
        if self.comm != MPI.COMM_NULL:
            meet(self.comm, f"the end of {self}", self.timeout_s)
            self._free_memory()
            self.comm.Free()

    def __str__(self) -> str:
        return f"{self.name} group ({self.backend}) of ranks {', '.join(map(str, self.ranks))}"

    # What a backend does, on flat contiguous CPU tensors that hold something.

    @abstractmethod
    def _reduce(self, flat: Tensor, combine: Combine) -> None: ...

    @abstractmethod
    def _all_gather(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None: ...

    @abstractmethod
    def _broadcast(self, flat: Tensor, root: int) -> None: ...

    def _free_memory(self) -> None:  # noqa: B027 (most backends hold nothing)
        """Give back what the backend holds besides the communicator; every rank is here."""

    def _local(self, x: Tensor, reduces: bool = False, read: bool = True) -> Tensor:
        """Contiguous `x`, or a copy of it where the backend can use that, or with read False just room
        for one. reduces: for sums and maxima."""
        if on_host(x):
            return x
        return host_copy(x) if read else host_like(x)

    def _reduce_in_place(self, x: Tensor, combine: Combine) -> Tensor:
        check_summable(x.dtype)
        if x.numel():
            host = self._local(x, reduces=True)
            self._reduce(host.view(-1), combine)
            if host is not x:
                x.copy_(host)
        return x

    def _wait(self, request: MPI.Request, what: str, timeout_s: float | None = None) -> None:
        self._wait_all([request], what, timeout_s)

    def _wait_all(self, requests: list[MPI.Request], what: str, timeout_s: float | None = None) -> None:
        limit = self.timeout_s if timeout_s is None else timeout_s
        self._abandoned += requests
        for request in requests:
            wait_until(request.Test, lambda: f"{what} in {self}", limit)
        del self._abandoned[len(self._abandoned) - len(requests) :]

    def _recorded_wait(self, operation: int, x: Tensor, peer: int) -> RunWait:
        run, number, rank = self._run, self._number, self.ranks[peer]
        size = x.nbytes
        return lambda idle, wait: run(number, operation, size, rank, idle, wait)

    def _describe(self, peer: int) -> str:
        return f"rank {self.ranks[peer]}"

    def _check_peer(self, peer: int, tag: int = 0) -> None:
        if not 0 <= tag < RESERVED_TAG:
            raise ValueError(f"tag: {tag} is out of range, expected 0 to {RESERVED_TAG - 1}")
        if not 0 <= peer < self.size:
            raise ValueError(f"peer: {peer} is not a rank of {self}, expected 0 to {self.size - 1}")

    def _checked_dim(self, x: Tensor, sizes: Sequence[int], dim: int, whole: bool) -> int:
        if len(sizes) != self.size:
            raise ValueError(
                f"sizes: {list(sizes)} hold {len(sizes)} numbers, expected {self.size}, one a rank"
            )
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"dim: {dim} is out of range for shape {list(x.shape)}")
        if min(sizes) < 0 or x.shape[dim] != (sum(sizes) if whole else sizes[self.rank]):
            raise ValueError(f"x: shape {list(x.shape)} along dim {dim} does not fit sizes {list(sizes)}")
        return dim % x.dim()


class SingleGroup(Group):
    """A group of one rank: collectives return their argument."""

    backend = "single"
    capturable = True

    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        self._checked_dim(x, sizes, dim, whole=True)
        return x

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        check_summable(x.dtype)
        self._checked_dim(x, sizes, dim, whole=True)
        return x

    def _reduce_in_place(self, x: Tensor, combine: Combine) -> Tensor:
        check_summable(x.dtype)
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        self._check_peer(root)
        return x

    def barrier(self) -> None:
        pass

    def broadcast_object(self, obj: Any, root: int = 0, timeout_s: float | None = None) -> Any:
        self._check_peer(root)
        return obj

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        self._check_peer(root)
        return [obj]

    def all_gather_objects(self, obj: Any) -> list[Any]:
        return [obj]

    def _reduce(self, flat: Tensor, combine: Combine) -> None:
        pass

    def _all_gather(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        out.copy_(flat)

    def _reduce_scatter(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        out.copy_(flat)

    def _broadcast(self, flat: Tensor, root: int) -> None:
        pass


def make_group(
    comm: MPI.Comm,
    backend: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    name: str = "group",
    ledger: Ledger | None = None,
    node_of_rank: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Group:
    """The group of the ranks of `comm`, over a duplicate of it. Collective; give it back with `free()`.

    `backend`: "mpi"; "shm", for ranks on one node; "hierarchical", shm inside nodes and mpi between them (a
    group that needs but one of the two has only that one); "nccl", for ranks with a GPU each; "auto": nccl
    where `device` is a GPU and NCCL can serve it, else as "hierarchical". `device`: what this rank's tensors
    are on, of one kind for all ranks; None for a group that moves none of a GPU often.
    `ledger`: where to record what this rank does in the group. `node_of_rank`: a number for each rank, the
    same for those of a node, in place of the nodes that are found.
    Raises `UserError`, on every rank, for a backend that is unknown or cannot serve these ranks.
    """
    from spmd.comm.hierarchical import HierarchicalGroup
    from spmd.comm.mpi import MpiGroup
    from spmd.comm.shm import ShmGroup

    if backend not in BACKENDS:
        raise UserError(
            f"communication backend: {backend!r} is unknown, expected one of {', '.join(BACKENDS)}"
        )
    on_gpu = device is not None and device.type == "cuda"
    if backend == "nccl" and not on_gpu:
        raise UserError(
            "communication backend: 'nccl' needs ranks with a GPU each, but they compute on the CPU; use "
            "--device cuda, or --comm-backend auto"
        )
    meet(comm, f"the start of the {name} group", timeout_s)
    if comm.size == 1:
        return SingleGroup(_own(comm), name, timeout_s)
    nodes = _find_nodes(comm) if node_of_rank is None else list(node_of_rank)
    one_node = len(set(nodes)) == 1
    if backend == "shm" and not one_node:
        raise UserError(
            f"communication backend: 'shm' needs all {comm.size} ranks of the {name} group on one node; "
            "use 'auto' or 'mpi'"
        )
    group: Group
    if backend == "mpi" or len(set(nodes)) == comm.size:
        group = MpiGroup(_own(comm), name, timeout_s)
    elif one_node:
        group = ShmGroup(_own(comm), name, timeout_s)
    else:
        group = HierarchicalGroup(_own(comm), nodes, name, timeout_s)
    if device is not None and on_gpu and backend in ("auto", "nccl"):
        from spmd.comm.nccl_choice import over_nccl

        group = over_nccl(group, nodes, device, required=backend == "nccl")
    if ledger is not None:
        group.record_in(ledger)
    return group


def host_backend(backend: str) -> str:
    """For a group whose tensors are in host memory, where those of others go by `backend`."""
    return "auto" if backend == "nccl" else backend


def _find_nodes(comm: MPI.Comm) -> list[int]:
    """For each rank the lowest one on its node."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    lowest = node.bcast(comm.rank, 0)
    node.Free()
    return comm.allgather(lowest)


def _run_unrecorded(
    group: int,
    operation: int,
    size: int,
    peer: int,
    idle: bool,
    call: Callable[..., T],
    *arguments: Any,
) -> T:
    return call(*arguments)


def _own(comm: MPI.Comm) -> MPI.Intracomm:
    return cast(MPI.Intracomm, comm.Dup())


def _room_beside(x: Tensor, count: int) -> Tensor:
    """Uninitialised `[count]` where `x` is, pinned as it is."""
    return torch.empty(
        count, dtype=x.dtype, device=x.device, pin_memory=x.device.type == "cpu" and x.is_pinned()
    )


def _counts(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[list[int], int]:
    """Elements of each rank's part, and how many rows lie before `dim`: 1 when parts are contiguous."""
    leading = math.prod(x.shape[:dim])
    row = leading * math.prod(x.shape[dim + 1 :])
    return [size * row for size in sizes], leading


def _with(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape
