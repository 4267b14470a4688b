"""The one-shot kernel's protocol, every interleaving of its steps on a few ranks: nobody reads what is not
written yet or writes what is still read, and nobody waits for ever. The model is of one_shot.cu by hand; that
the kernel follows it is shown by running its source (test_one_shot_mpi.py), and memory order is the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

# A block's place in its step: writing its slot; 1 + k: k ranks told; READING: all have told it; DONE.
WRITING, READING, DONE = 0, 100, 101
Blocks = tuple[tuple[int, ...], ...]  # of each rank, each block's place
State = tuple[tuple[int, ...], Blocks, tuple[tuple[tuple[int, ...], ...], ...], tuple[tuple[int, ...], ...]]


class Broken(Exception):
    pass


@dataclass(frozen=True)
class Protocol:
    """blocks: of each step, 1 (which covers both parts of a slot) or 2. The rest are ways to get it wrong."""

    ranks: int
    blocks: tuple[int, ...]
    slots: int = 2
    told_first: bool = False  # before the slot is written
    deaf_to: int | None = None  # a rank that is not waited for

    def explore(self) -> int:
        """The number of states there are; raises `Broken` when one is wrong."""
        start = self._begin(
            tuple([0] * self.ranks),
            tuple(() for _ in range(self.ranks)),
            tuple(tuple((0,) * self.ranks for _ in range(2)) for _ in range(self.ranks)),
            tuple((0,) * (2 * self.slots) for _ in range(self.ranks)),
            range(self.ranks),
        )
        seen, ahead = {start}, [start]
        while ahead:
            state = ahead.pop()
            found = list(self._next(state))
            if not found and any(step <= len(self.blocks) for step in state[0]):
                raise Broken(f"all wait: {state}")
            for other in found:
                if other not in seen:
                    seen.add(other)
                    ahead.append(other)
        return len(seen)

    def _parts(self, step: int, block: int) -> tuple[int, ...]:
        return (0, 1) if self.blocks[step - 1] == 1 else (block,)

    def _cell(self, step: int, part: int) -> int:
        return step % self.slots * 2 + part

    def _begin(
        self,
        steps: tuple[int, ...],
        blocks: Blocks,
        flags: tuple[tuple[tuple[int, ...], ...], ...],
        cells: tuple[tuple[int, ...], ...],
        ranks: range,
    ) -> State:
        """Start the next kernel on `ranks`: it may be writing its slot from now on."""
        new_steps, new_blocks, new_cells = list(steps), list(blocks), [list(row) for row in cells]
        for rank in ranks:
            new_steps[rank] += 1
            step = new_steps[rank]
            if step > len(self.blocks):
                new_blocks[rank] = ()
                continue
            new_blocks[rank] = (WRITING,) * self.blocks[step - 1]
            for block in range(self.blocks[step - 1]):
                for part in self._parts(step, block):
                    cell = self._cell(step, part)
                    for reader in range(self.ranks):
                        for number, place in enumerate(blocks[reader]):
                            read = steps[reader]
                            reads = place == READING and part in self._parts(read, number)
                            if reads and self._cell(read, part) == cell:
                                raise Broken(f"rank {rank} writes in step {step} what rank {reader} reads")
                    new_cells[rank][cell] = -step
        return tuple(new_steps), tuple(new_blocks), flags, tuple(map(tuple, new_cells))

    def _next(self, state: State) -> Iterator[State]:
        steps, blocks, flags, cells = state
        for rank in range(self.ranks):
            step = steps[rank]
            for block, place in enumerate(blocks[rank]):
                if place == DONE:
                    continue
                new_cells, new_flags, after = cells, flags, place + 1
                if place < self.ranks:  # tell the next rank; the first time, the slot is written
                    if place == (self.ranks - 1 if self.told_first else 0):
                        row = list(cells[rank])
                        for part in self._parts(step, block):
                            row[self._cell(step, part)] = step
                        new_cells = _with(cells, rank, tuple(row))
                    row = list(flags[place][block])
                    row[rank] = step
                    new_flags = _with(flags, place, _with(flags[place], block, tuple(row)))
                elif place == self.ranks:  # wait
                    heard = flags[rank][block]
                    if any(heard[other] < step for other in range(self.ranks) if other != self.deaf_to):
                        continue
                    for other in range(self.ranks):
                        for part in self._parts(step, block):
                            if cells[other][self._cell(step, part)] != step:
                                raise Broken(
                                    f"rank {rank} reads in step {step} what is not rank {other}'s part of it"
                                )
                    after = READING
                new_blocks = _with(blocks, rank, _with(blocks[rank], block, after))
                ended = all(other == DONE for other in new_blocks[rank])
                if ended:
                    yield self._begin(steps, new_blocks, new_flags, new_cells, range(rank, rank + 1))
                else:
                    yield steps, new_blocks, new_flags, new_cells


def _with(row: tuple, place: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*row[:place], value, *row[place + 1 :])


@pytest.mark.parametrize(
    ("ranks", "blocks"),
    [(2, (1, 1, 1, 1, 1)), (3, (1, 1, 1, 1)), (2, (1, 2, 1, 2, 2)), (2, (2, 1, 1, 2)), (3, (2, 1))],
)
def test_every_interleaving_is_right(ranks: int, blocks: tuple[int, ...]) -> None:
    assert Protocol(ranks, blocks).explore() > 100


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (Protocol(2, (1, 1, 1), slots=1), "writes in step 2|reads in step 1"),
        (Protocol(2, (1, 2, 1), slots=1), "writes in step 2|reads in step 1"),
        (Protocol(2, (1,), told_first=True), "is not rank [01]'s part"),
        (Protocol(3, (1,), deaf_to=1), "is not rank [01]'s part"),
    ],
    ids=["one slot", "one slot, several blocks", "told before it is written", "one rank not waited for"],
)
def test_the_model_finds_what_is_wrong(broken: Protocol, why: str) -> None:
    with pytest.raises(Broken, match=why):
        broken.explore()
