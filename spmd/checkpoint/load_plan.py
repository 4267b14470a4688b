"""Who reads which bytes of a checkpoint, and who gets them: computed alike on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spmd.checkpoint.stored import Part, Region, StoredTensor

PIECE_BYTES = 8 << 20  # of one read
READ_BYTES = 16 << 20  # that one rank reads in a round
ARRIVING_BYTES = 64 << 20  # that one rank gets in a round


@dataclass(frozen=True)
class Want:
    """Bytes of a piece that every rank of a place needs: for the `number`-th of the regions it wants."""

    place: int
    number: int
    region: Region


@dataclass(frozen=True)
class Piece:
    """Rows of a stored tensor that one rank reads, in one go: `nbytes` from `offset` on."""

    name: str
    file: str
    offset: int
    region: Region
    reader: int
    wants: tuple[Want, ...]


@dataclass(frozen=True)
class LoadPlan:
    """Pieces in rounds, each of bounded size on every rank. Ranks are numbered as in the grid: the places of
    the first replica, then those of the second, ..."""

    rounds: tuple[tuple[Piece, ...], ...]
    places: int
    replicas: int

    def ranks(self, place: int) -> range:
        """The ranks of a place, one of each replica."""
        return range(place, self.places * self.replicas, self.places)

    @property
    def total_bytes(self) -> int:
        return sum(piece.region.nbytes for pieces in self.rounds for piece in pieces)


def plan_load(
    stored: Mapping[str, StoredTensor], wanted: Sequence[Sequence[tuple[str, Region]]], replicas: int
) -> LoadPlan:
    """`wanted`: for each place (pipeline stage and tensor-parallel rank) the regions it needs, in the order
    in which it needs them. Every byte is read once, by the rank that has the least to read among those that
    need it. All stages advance together: a tensor's turn is the share of a place's bytes that come before it.
    """
    uses = _uses(wanted)
    order = sorted(uses, key=lambda name: min(turn for turn, _ in uses[name]))
    builder = _Rounds(len(wanted), replicas)
    for name in order:
        wants = [want for _, want in uses[name]]
        for part in stored[name].parts:
            for region, piece_wants in _pieces(part, wants):
                builder.add(name, part, region, piece_wants)
    return LoadPlan(builder.finish(), len(wanted), replicas)


Turn = tuple[float, int, int]


def _uses(wanted: Sequence[Sequence[tuple[str, Region]]]) -> dict[str, list[tuple[Turn, Want]]]:
    """For each tensor who wants what of it, and when."""
    uses: dict[str, list[tuple[Turn, Want]]] = {}
    for place, regions in enumerate(wanted):
        total = max(1, sum(region.nbytes for _, region in regions))
        before = 0
        for number, (name, region) in enumerate(regions):
            if region.nbytes:
                turn = (before / total, place, number)
                uses.setdefault(name, []).append((turn, Want(place, number, region)))
            before += region.nbytes
    return uses


def _pieces(part: Part, wants: Sequence[Want]) -> list[tuple[Region, tuple[Want, ...]]]:
    """The part cut into pieces no larger than PIECE_BYTES where it has several rows, none of which a want
    begins or ends in; without those that nobody wants."""
    (start, stop), columns = part.region.rows, part.region.columns
    bounds = {start, stop}
    for want in wants:
        bounds.update(row for row in want.region.rows if start < row < stop)
    step = max(1, PIECE_BYTES // max(1, columns[1] - columns[0]))
    pieces = []
    cuts = sorted(bounds)
    for low, high in pairwise(cuts):
        inside = [(want, want.region & Region((low, high), columns)) for want in wants]
        inside = [(want, region) for want, region in inside if region.nbytes]
        if not inside:
            continue
        for first in range(low, high, step):
            rows = Region((first, min(high, first + step)), columns)
            pieces.append(
                (rows, tuple(Want(want.place, want.number, region & rows) for want, region in inside))
            )
    return pieces


class _Rounds:
    """Gives each piece a reader and fills round after round."""

    def __init__(self, places: int, replicas: int) -> None:
        self._loads = np.zeros((replicas, places), dtype=np.int64)
        self._reading = np.zeros((replicas, places), dtype=np.int64)  # in the round that is being filled
        self._arriving = np.zeros(places, dtype=np.int64)
        self._rounds: list[tuple[Piece, ...]] = []
        self._pieces: list[Piece] = []

    def add(self, name: str, part: Part, region: Region, wants: tuple[Want, ...]) -> None:
        places = sorted({want.place for want in wants})
        replica, index = np.unravel_index(
            int(self._loads[:, places].argmin()), (len(self._loads), len(places))
        )
        reader = (int(replica), places[int(index)])
        arriving = np.zeros_like(self._arriving)
        for want in wants:
            arriving[want.place] += want.region.nbytes
        too_much = self._reading[reader] + region.nbytes > READ_BYTES
        if self._pieces and (too_much or (self._arriving + arriving).max() > ARRIVING_BYTES):
            self._close()
        self._arriving += arriving
        self._reading[reader] += region.nbytes
        self._loads[reader] += region.nbytes
        row_bytes = region.shape[1]
        offset = part.offset + (region.rows[0] - part.region.rows[0]) * row_bytes
        rank = reader[0] * self._loads.shape[1] + reader[1]
        self._pieces.append(Piece(name, part.file, offset, region, rank, wants))

    def finish(self) -> tuple[tuple[Piece, ...], ...]:
        if self._pieces:
            self._close()
        return tuple(self._rounds)

    def _close(self) -> None:
        self._rounds.append(tuple(self._pieces))
        self._pieces = []
        self._reading[:] = 0
        self._arriving[:] = 0
