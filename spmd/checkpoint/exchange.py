"""Carrying out a load plan: every rank reads its part of the checkpoint and sends on what others need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from spmd.checkpoint.assembly import Sink
from spmd.checkpoint.file_reader import FileReader
from spmd.checkpoint.load_plan import LoadPlan, Piece, Want
from spmd.comm.agree import agreed
from spmd.comm.errors import UserError
from spmd.comm.group import Group
from spmd.comm.pending import PendingRecv, PendingSend


class Exchange:
    """The rounds of a plan, on one rank. `sinks` take the regions that this rank's place wants, by
    their numbers.

    Every rank takes part in every round, in order, and waits for nothing of another rank between two rounds;
    in a round it posts all receives before it reads and sends, and waits last. So no two ranks can wait for
    one another: a wait is always for a rank that has not come to the round yet.

    A rank that cannot read (or go on, see `step`) takes part to the round's end, as others wait for its
    messages; then all raise its `UserError`. Memory beyond the sinks is what is read and what arrives in one
    round (see load_plan.py).
    """

    def __init__(
        self,
        world: Group,
        plan: LoadPlan,
        sinks: Mapping[int, Sink],
        on_read: Callable[[int], object] | None = None,
    ) -> None:
        """`on_read` is called with the bytes that all ranks have read in a round."""
        self.files = FileReader()
        self.failed = False  # a round has raised
        self._world = world
        self._plan = plan
        self._sinks = sinks
        self._on_read = on_read
        self._place = world.rank % plan.places if world.rank < plan.places * plan.replicas else None
        self._next = 0
        # Its unused pages are never touched, so they take no memory.
        largest = max((self._read_bytes(pieces) for pieces in plan.rounds), default=0)
        self._buffer = torch.empty(largest, dtype=torch.uint8)

    @property
    def done(self) -> bool:
        return self._next == len(self._plan.rounds)

    def step(self, fault: UserError | None = None) -> None:
        """The next round. Collective over the world. Raises `UserError` on every rank when one cannot read,
        or brings the `fault` that keeps it from going on."""
        pieces = self._plan.rounds[self._next]
        self._next += 1
        self.failed = True
        with agreed(self._world):
            self._round(pieces, [] if fault is None else [fault])
        self.failed = False
        if self._on_read is not None:
            self._on_read(sum(piece.region.nbytes for piece in pieces))
        if self.done:
            self.files.close()
            self._buffer = self._buffer[:0].clone()

    def _round(self, pieces: Sequence[Piece], faults: list[UserError]) -> None:
        receives = [
            (want, *self._receive(piece, want))
            for piece in pieces
            if piece.reader != self._world.rank
            for want in piece.wants
            if want.place == self._place
        ]
        sends: list[PendingSend] = []
        used = 0
        for piece in pieces:
            if piece.reader == self._world.rank:
                buffer = self._buffer[used : used + piece.region.nbytes].view(piece.region.shape)
                used += piece.region.nbytes
                sends += self._read(piece, buffer, faults)
        self._expect_next()
        for want, pending, staged in receives:
            pending.wait()
            self._take(want, staged, faults)
        for pending_send in sends:
            pending_send.wait()
        if faults:
            raise faults[0]

    def _receive(self, piece: Piece, want: Want) -> tuple[PendingRecv, Tensor | None]:
        """A receive under way, and the memory it goes to if that is not the sink's own."""
        memory = self._sinks[want.number].memory(want.region)
        staged = None
        if memory is None:
            memory = staged = torch.empty(want.region.shape, dtype=torch.uint8)
        return self._world.irecv(memory, piece.reader), staged

    def _read(self, piece: Piece, buffer: Tensor, faults: list[UserError]) -> list[PendingSend]:
        """Read a piece, send it on, and keep what this rank wants of it itself."""
        first = piece.wants[0]
        alone = len(piece.wants) == 1 and self._plan.replicas == 1 and first.region == piece.region
        memory = self._sinks[first.number].memory(piece.region) if alone else None
        try:
            if not faults:
                self.files.read(piece.name, piece.file, piece.offset, buffer if memory is None else memory)
        except UserError as error:
            faults.append(error)
        if memory is not None:
            self._take(first, None, faults)
            return []
        sends = []
        for want in piece.wants:
            part = buffer[want.region.within(piece.region)].contiguous()
            for rank in self._plan.ranks(want.place):
                if rank != self._world.rank:
                    sends.append(self._world.isend(part, rank))
                    continue
                own = self._sinks[want.number].memory(want.region)
                if own is not None:
                    own.copy_(part)
                self._take(want, part if own is None else None, faults)
        return sends

    def _take(self, want: Want, raw: Tensor | None, faults: list[UserError]) -> None:
        if faults:
            return
        sink = self._sinks[want.number]
        try:
            if raw is None:
                sink.placed(want.region)
            else:
                sink.place(want.region, raw)
        except UserError as error:
            faults.append(error)

    def _expect_next(self) -> None:
        """While messages travel, let storage fetch what comes next."""
        if not self.done:
            for piece in self._plan.rounds[self._next]:
                if piece.reader == self._world.rank:
                    self.files.expect(piece.file, piece.offset, piece.region.nbytes)

    def _read_bytes(self, pieces: Sequence[Piece]) -> int:
        return sum(piece.region.nbytes for piece in pieces if piece.reader == self._world.rank)
