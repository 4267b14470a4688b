"""The grid of ranks: who is in which tensor, pipeline and data parallel group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpi4py import MPI

from spmd.comm.agree import agreed
from spmd.comm.errors import UserError
from spmd.comm.group import DEFAULT_TIMEOUT_S, Group, host_backend, make_group
from spmd.comm.ledger import Ledger
from spmd.comm.waiting import meet


def factor_world(world: int, tp: int | None, pp: int | None, dp: int | None) -> tuple[int, int, int]:
    """(dp, pp, tp) with dp * pp * tp = `world` ranks. `tp` and `pp` default to 1, `dp` to what is left over.

    Raises `UserError`, the same on every rank, naming all four numbers and the sizes that would work.
    """
    for name, value in (("tp", tp), ("pp", pp), ("dp", dp)):
        if value is not None and value < 1:
            raise UserError(f"--{name}: {value} is out of range, expected at least 1")
    stages, shards = 1 if pp is None else pp, 1 if tp is None else tp
    replicas = world // (stages * shards) if dp is None else dp
    if world < 1:
        raise ValueError(f"world: {world} is out of range, expected at least 1")
    if replicas * stages * shards == world:
        return replicas, stages, shards
    asked = " x ".join(
        f"{name} {default if value is None else value}"
        for name, value, default in (("tp", tp, "1"), ("pp", pp, "1"), ("dp", dp, "(what is left over)"))
    )
    raise UserError(f"world: {world} ranks do not factor into {asked}; {_advice(world, shards, stages, dp)}")


def _advice(world: int, tp: int, pp: int, dp: int | None) -> str:
    """The number of ranks these sizes need, and for each size the values that fit if the others stay."""
    product = tp * pp * (dp or 1)
    choices = [f"start {product} ranks" if dp else f"start a multiple of {product} ranks"]
    for name, others in (("tp", pp * (dp or 1)), ("pp", tp * (dp or 1)), ("dp", tp * pp)):
        if world % others == 0 and not (name == "dp" and dp is None):
            left = world // others
            fits = [left] if dp else [size for size in range(1, left + 1) if left % size == 0]
            choices.append(f"use --{name} {_listed(fits)}")
    if len(choices) == 1:
        fits = [size for size in range(1, world + 1) if world % size == 0]
        choices.append(f"choose each size among {_listed(fits)}")
    return ", or ".join(choices)


def _listed(sizes: list[int]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, sizes[:-1])), str(sizes[-1]))))


class Grid:
    """Owns every communicator of the job. Made once by `Grid.create`, passed on, never global.

    Rank order is TP fastest, then PP, then DP: `rank = (dp_rank * pp_size + pp_rank) * tp_size + tp_rank`,
    so a TP group sits on neighbouring ranks. `replica` holds the pp x tp ranks of one model copy, in
    that order; `node` the ranks that share this rank's memory. `device` is the rank's own; tensors on it
    travel in `tp` and `pp`, while the other groups carry what is in host memory.
    """

    def __init__(self, *, world: Group, tp: Group, pp: Group, dp: Group, replica: Group, node: Group) -> None:
        self.world = world
        self.tp = tp
        self.pp = pp
        self.dp = dp
        self.replica = replica
        self.node = node
        self.device = torch.device("cpu")
        self.ledger: Ledger | None = None

    @classmethod
    def create(
        cls,
        comm: MPI.Comm,
        tp: int | None = None,
        pp: int | None = None,
        dp: int | None = None,
        backend: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ledger: Ledger | None = None,
        take_device: Callable[[Group], torch.device] | None = None,
    ) -> Grid:
        """Split `comm` (which stays the caller's) into a grid. Collective.

        `backend`, `timeout_s` and `ledger` as in `make_group`; `free` closes the ledger. `take_device` binds
        this rank to its device, given the node's group, before any group uses it; without, that is the CPU.
        Raises `UserError` on every rank when the world does not factor, a rank gets no device, or the backend
        cannot serve it.
        """
        _, stages, shards = factor_world(comm.size, tp, pp, dp)
        meet(comm, "the grid of ranks", timeout_s)
        base = comm.Dup()

        device = torch.device("cpu")
        host = host_backend(backend)

        def split(name: str, color: int, moves_device_tensors: bool = False) -> Group:
            part = base.Split(color, base.rank)
            if moves_device_tensors:
                group = make_group(part, backend, timeout_s, name, ledger, device=device)
            else:
                group = make_group(part, host, timeout_s, name, ledger)
            part.Free()
            return group

        replica, place = divmod(base.rank, stages * shards)
        stage, shard = divmod(place, shards)
        try:
            world = make_group(base, host, timeout_s, "world", ledger)
            part = base.Split_type(MPI.COMM_TYPE_SHARED, base.rank)
            node = make_group(part, host, timeout_s, "node", ledger)
            part.Free()
            if take_device is not None:
                device = _agree_on_device(world, node, take_device)
            grid = cls(
                world=world,
                tp=split("tp", replica * stages + stage, moves_device_tensors=True),
                pp=split("pp", replica * shards + shard, moves_device_tensors=True),
                dp=split("dp", place),
                replica=split("replica", replica),
                node=node,
            )
            grid.device = device
            grid.ledger = ledger
            if backend == "auto":
                with agreed(world):
                    grid.tp.prepare_sums()
        finally:
            base.Free()
        return grid

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def tp_rank(self) -> int:
        return self.tp.rank

    @property
    def pp_rank(self) -> int:
        return self.pp.rank

    @property
    def dp_rank(self) -> int:
        return self.dp.rank

    @property
    def node_rank(self) -> int:
        return self.node.rank

    @property
    def tp_size(self) -> int:
        return self.tp.size

    @property
    def pp_size(self) -> int:
        return self.pp.size

    @property
    def dp_size(self) -> int:
        return self.dp.size

    @property
    def node_size(self) -> int:
        return self.node.size

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    def free(self) -> None:
        """Give back all communicators and shared memory. Collective over the world."""
        for group in (self.tp, self.pp, self.dp, self.replica, self.node, self.world):
            group.free()
        if self.ledger is not None:
            self.ledger.close()

    def __str__(self) -> str:
        axes = ", ".join(f"{group.name} {group.rank}/{group.size}" for group in (self.dp, self.pp, self.tp))
        return f"rank {self.rank}/{self.size}: {axes}, node {self.node_rank}/{self.node_size}"


def _agree_on_device(world: Group, node: Group, take_device: Callable[[Group], torch.device]) -> torch.device:
    device = torch.device("cpu")
    with agreed(world):
        device = take_device(node)
    kinds = world.all_gather_objects(device.type)
    if len(set(kinds)) > 1:
        bare = kinds.index("cpu")
        other = next(rank for rank, kind in enumerate(kinds) if kind != "cpu")
        raise UserError(
            f"--device: rank {other} computes on a GPU, but rank {bare} on the CPU, as its node shows it "
            "none; start the ranks on nodes that are alike, or use --device cpu"
        )
    return device
