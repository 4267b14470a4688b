"""Collectives of ranks on several nodes: shared memory inside a node, MPI between one rank of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from mpi4py import MPI
from torch import Tensor

from spmd.comm.group import DEFAULT_TIMEOUT_S, Combine, Group
from spmd.comm.mpi import MpiGroup
from spmd.comm.partition import Partition
from spmd.comm.reduce import sum_into
from spmd.comm.shm import Operation, ShmGroup

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class HierarchicalGroup(Group):
    """Group whose first rank on each node, the node's leader, speaks for the others of that node.

    A reduction is summed in the node's shared memory, then by the leaders over MPI, and comes back through
    the shared memory, so that each byte crosses the slow link once, however many ranks a node has.

    Order of a sum: over the ranks of a node in rank order, then over the nodes in the order of their leaders.
    It is fixed, so every rank gets the same bits in every run of one layout; but it is another association
    than that of the other backends, (a + b) + (c + d) for ((a + b) + c) + d, so that the last bits may differ
    from theirs. 16-bit floats stay in fp32 until all are added.

    node_of_rank: a number for each rank, the same for ranks of one node. They need not be neighbours.
    Attribute `nodes`: the ranks of each node. slot_bytes as in `ShmGroup`, inside a node; one_shot_bytes as
    in `MpiGroup`, between leaders.
    """

    backend = "hierarchical"

    def __init__(
        self,
        comm: MPI.Intracomm,
        node_of_rank: Sequence[int],
        name: str = "group",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        slot_bytes: int = 512 << 10,
        one_shot_bytes: int = 32 << 10,
    ) -> None:
        super().__init__(comm, name, timeout_s)
        if len(node_of_rank) != self.size:
            raise ValueError(
                f"node_of_rank: {len(node_of_rank)} numbers, expected {self.size}, one for each rank"
            )
        by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(node_of_rank):
            by_node.setdefault(node, []).append(rank)
        self.nodes = tuple(map(tuple, by_node.values()))
        self._node = next(i for i, ranks in enumerate(self.nodes) if self.rank in ranks)
        self._members = self.nodes[self._node]
        self._order = [rank for ranks in self.nodes for rank in ranks]
        self._neighbours = self._order == list(range(self.size))
        inside = cast(MPI.Intracomm, comm.Split(self._node, self.rank))
        self._inside = ShmGroup(inside, f"{name} group's node", timeout_s, slot_bytes=slot_bytes)
        leads = self._inside.rank == 0
        leaders = cast(MPI.Intracomm, comm.Split(0 if leads else MPI.UNDEFINED, self.rank))
        self._leaders: MpiGroup | None = None
        if leads:
            self._leaders = MpiGroup(leaders, f"{name} group's leaders", timeout_s, one_shot_bytes)

    def barrier(self) -> None:
        self._inside.barrier()
        if self._leaders is not None:
            self._leaders.barrier()
        self._inside.barrier()

    def _reduce(self, flat: Tensor, combine: Combine) -> None:
        summing = combine is sum_into
        widened = summing and flat.dtype in _WIDE
        leaders = self._leaders
        total = torch.empty(flat.numel() if leaders else 0, dtype=_WIDE[flat.dtype]) if widened else flat
        operation = Operation.all_reduce if summing else Operation.all_reduce_max
        self._combine_inside(flat, total, combine, operation)
        if leaders is not None:
            if widened and total.nbytes > leaders.one_shot_bytes:
                # The second of the two phases carries sums that are rounded already.
                counts = Partition.even(flat.numel(), leaders.size).counts
                mine = torch.empty(counts[leaders.rank], dtype=total.dtype)
                leaders._reduce_scatter(total, counts, mine)
                leaders._all_gather(mine.to(flat.dtype), counts, flat)
            else:
                leaders._reduce(total, combine)
                if widened:
                    flat.copy_(total)
        self._inside._broadcast(flat, 0)

    def _all_gather(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        sizes = self._node_sizes(counts)
        block = torch.empty(sizes[self._node], dtype=flat.dtype)
        self._inside._all_gather(flat, [counts[rank] for rank in self._members], block)
        gathered = out if self._neighbours else torch.empty_like(out)
        if self._leaders is not None:
            self._leaders._all_gather(block, sizes, gathered)
        self._inside._broadcast(gathered, 0)
        if not self._neighbours:
            parts = out.split(list(counts))
            for rank, part in zip(self._order, gathered.split([counts[rank] for rank in self._order])):
                parts[rank].copy_(part)

    def _reduce_scatter(self, flat: Tensor, counts: Sequence[int], out: Tensor) -> None:
        sizes = self._node_sizes(counts)
        if not self._neighbours:
            parts = flat.split(list(counts))
            flat = torch.cat([parts[rank] for rank in self._order])
        wide = _WIDE.get(flat.dtype, flat.dtype)
        total = torch.empty(flat.numel() if self._leaders is not None else 0, dtype=wide)
        self._combine_inside(flat, total, sum_into, Operation.reduce_scatter)
        block = torch.empty(sizes[self._node], dtype=flat.dtype)
        if self._leaders is not None:
            summed = torch.empty(block.numel(), dtype=wide)
            self._leaders._reduce_scatter(total, sizes, summed)
            block.copy_(summed)
        if block.numel():
            self._inside._broadcast(block, 0)
        out.copy_(block.split([counts[rank] for rank in self._members])[self._inside.rank])

    def _broadcast(self, flat: Tensor, root: int) -> None:
        home = next(i for i, ranks in enumerate(self.nodes) if root in ranks)
        if self._node == home:
            self._inside._broadcast(flat, self._members.index(root))
        if self._leaders is not None:
            self._leaders._broadcast(flat, home)
        if self._node != home:
            self._inside._broadcast(flat, 0)

    def _combine_inside(self, flat: Tensor, total: Tensor, combine: Combine, operation: Operation) -> None:
        """On the node's leader: `total` = the node's tensors combined in rank order."""
        node, size = self._inside, flat.nbytes
        room = node.slot_bytes // flat.element_size()
        for start in range(0, flat.numel(), room):
            piece = flat[start : start + room]
            slots = node._slots(flat.dtype, piece.numel())
            slots[node.rank].copy_(piece)
            node._step(operation, size)
            if self._leaders is not None:
                combine(total[start : start + room], slots)

    def _node_sizes(self, counts: Sequence[int]) -> list[int]:
        return [sum(counts[rank] for rank in ranks) for ranks in self.nodes]

    def _free_memory(self) -> None:
        self._inside.free()
        if self._leaders is not None:
            self._leaders.free()
