"""Who reads which bytes of a checkpoint, and who gets them: computed alike on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from spmd.checkpoint.stored import Part, Region, StoredTensor

PIECE_BYTES = 8 << 20  # of one read
READ_BYTES = 16 << 20  # that one rank reads in a round
ARRIVING_BYTES = 64 << 20  # that one rank gets in a round
OPEN_ROUNDS = 4  # that are filled at a time: so many rounds early a piece may come


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
    in which it needs them. Every byte is read once, by a rank that needs it.

    All places advance together, so that all ranks read all the time: a piece's turn is the share of a place's
    bytes that come before it. Of several ranks that need a piece the one that can read it first does, or else
    the one that has least to read.
    """
    uses: dict[str, list[Want]] = {}
    for place, regions in enumerate(wanted):
        for number, (name, region) in enumerate(regions):
            if region.nbytes:
                uses.setdefault(name, []).append(Want(place, number, region))
    turns = _Turns(wanted)
    pieces = [
        (min(map(turns.of, piece_wants)), name, part, region, piece_wants)
        for name, wants in uses.items()
        for part in stored[name].parts
        for region, piece_wants in _pieces(part, wants)
    ]
    pieces.sort(key=lambda piece: piece[0])
    rounds = _Rounds(len(wanted), replicas)
    for _, name, part, region, piece_wants in pieces:
        rounds.add(name, part, region, piece_wants)
    return LoadPlan(rounds.finish(), len(wanted), replicas)


class _Turns:
    """When a place needs the rows of a want: the share of its bytes before them, then place and number."""

    def __init__(self, wanted: Sequence[Sequence[tuple[str, Region]]]) -> None:
        self._wanted = wanted
        self._before = [
            list(accumulate((region.nbytes for _, region in regions), initial=0)) for regions in wanted
        ]

    def of(self, want: Want) -> tuple[float, int, int]:
        """Its region may be a part of the one that is wanted."""
        before = self._before[want.place]
        _, whole = self._wanted[want.place][want.number]
        rows = want.region.rows[0] - whole.rows[0]
        return (before[want.number] + rows * whole.shape[1]) / before[-1], want.place, want.number


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


@dataclass
class _Round:
    reading: list[int]  # bytes of each rank
    arriving: list[int]  # bytes at each place
    pieces: list[Piece] = field(default_factory=list)

    def takes(self, arriving: Mapping[int, int]) -> bool:
        """A place gets ARRIVING_BYTES at most, or one piece."""
        return all(
            not self.arriving[place] or self.arriving[place] + size <= ARRIVING_BYTES
            for place, size in arriving.items()
        )

    def can_read(self, rank: int, size: int) -> bool:
        """A rank reads READ_BYTES at most, or one piece."""
        return not self.reading[rank] or self.reading[rank] + size <= READ_BYTES


class _Rounds:
    """Gives each piece a reader and the first of the last OPEN_ROUNDS rounds that has room for it."""

    def __init__(self, places: int, replicas: int) -> None:
        self._places = places
        self._loads = [0] * (places * replicas)
        self._rounds: list[_Round] = []

    def add(self, name: str, part: Part, region: Region, wants: tuple[Want, ...]) -> None:
        arriving: dict[int, int] = {}
        for want in wants:
            arriving[want.place] = arriving.get(want.place, 0) + want.region.nbytes
        taken, reader = self._choose(region.nbytes, arriving)
        for place, size in arriving.items():
            taken.arriving[place] += size
        taken.reading[reader] += region.nbytes
        self._loads[reader] += region.nbytes
        offset = part.offset + (region.rows[0] - part.region.rows[0]) * region.shape[1]
        taken.pieces.append(Piece(name, part.file, offset, region, reader, wants))

    def finish(self) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(filled.pieces) for filled in self._rounds)

    def _choose(self, size: int, arriving: Mapping[int, int]) -> tuple[_Round, int]:
        ranks = [rank for place in arriving for rank in range(place, len(self._loads), self._places)]
        ranks.sort(key=self._loads.__getitem__)
        for filled in self._rounds[-OPEN_ROUNDS:]:
            if filled.takes(arriving):
                for rank in ranks:
                    if filled.can_read(rank, size):
                        return filled, rank
        self._rounds.append(_Round([0] * len(self._loads), [0] * self._places))
        return self._rounds[-1], ranks[0]
