"""Sums over ranks from inside a kernel: what the kernel needs to know of the memory its group shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WORD_BITS = 24  # of a published word, below its sequence number: operation and checksum


@dataclass
class ReductionWindow:
    """One-step sums of `size` ranks, done by a kernel in place of calls of `all_reduce`.

    For every sum the kernel writes its part to `slots[(sequence + 1) & 1][rank]`, adds 1 to `sequence`,
    writes the bytes of a part and 0 to the second and third int64 at `words[rank]`, publishes
    `sequence << WORD_BITS | check` in the first, and adds the parts, in rank order, once every rank has
    published that word or a later one.

    words: address of a table of `size` addresses; slots: of a table of 2 x `size`. check: what is summed.
    """

    size: int
    rank: int
    words: int
    slots: int
    sequence: int
    check: int
    # wait(sequence) returns when all ranks have published step `sequence`, or raises as the group does.
    wait: Callable[[int], None]
    # close(sequence, seconds): the kernel is done, having got to step `sequence`; `seconds` it spent on sums.
    close: Callable[[int, float], None]
