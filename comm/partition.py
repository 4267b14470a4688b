"""How a count (heads, vocabulary rows, layers, columns) is split into contiguous parts, evenly or not."""

from __future__ import annotations

import builtins
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np


@dataclass(frozen=True)
class Partition:
    """Contiguous split of `range(total)`; part `i` holds `range(bounds[i], bounds[i + 1])`.

    Parts may be empty. Raises `ValueError` when `bounds` does not start at 0, decreases, or has no part.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        bounds = tuple(int(bound) for bound in self.bounds)
        if len(bounds) < 2:
            raise ValueError(f"bounds: {bounds} describe no part, expected at least two numbers")
        if bounds[0] != 0:
            raise ValueError(f"bounds: {bounds} start at {bounds[0]}, expected 0")
        if any(low > high for low, high in pairwise(bounds)):
            raise ValueError(f"bounds: {bounds} decrease, expected rising numbers")
        object.__setattr__(self, "bounds", bounds)

    @classmethod
    def even(cls, total: int, parts: int, align: int = 1) -> Partition:
        """As even as possible, larger parts first: 9 over 2 is 5 + 4.

        Every inner bound is a multiple of `align`, so a block of `align` items is never cut; a ragged
        block at the end goes to the last part that has any.
        """
        _check_parts(parts)
        if total < 0:
            raise ValueError(f"total: {total} is negative")
        if align < 1:
            raise ValueError(f"align: {align} is out of range, expected at least 1")
        share, extra = divmod(-(-total // align), parts)
        bounds = [align * (share * part + min(part, extra)) for part in range(parts)]
        # With fewer blocks than parts and a ragged end, a bound may lie past the total: the parts
        # between the whole blocks and the end stay empty, and the last part takes the ragged block.
        return cls((*(min(bound, total // align * align) for bound in bounds), total))

    @classmethod
    def weighted(cls, weights: Sequence[float], parts: int) -> Partition:
        """Contiguous split of `len(weights)` items that minimises the weight of the heaviest part.

        With at least as many items as parts, each part gets at least one item; with fewer, the first
        parts get one each. Among splits with the same heaviest part, the one with the smallest sum of
        squared part weights is taken (30 equal items over 4: 8 + 8 + 7 + 7), then the one with larger
        parts first. Exact dynamic programme, O(parts * items^2) at worst: meant for layers, not tokens.
        """
        _check_parts(parts)
        items = len(weights)
        for index, weight in enumerate(weights):
            if not math.isfinite(weight) or weight < 0:
                raise ValueError(f"weights[{index}]: {weight} is not a finite number of at least 0")
        if items <= parts:
            return cls(tuple(min(part, items) for part in range(parts + 1)))
        prefix = np.array(list(accumulate((float(weight) for weight in weights), initial=0.0)))
        limit = _smallest_maximum(prefix, parts)
        # cost[i]: least sum of squares over the first i items in `part` parts, none above the limit.
        cost = np.full(items + 1, np.inf)
        cost[0] = 0.0
        choices: list[list[int]] = []
        for part in range(1, parts + 1):
            following = np.full(items + 1, np.inf)
            choice = [0] * (items + 1)
            for stop in range(part, items - (parts - part) + 1):
                loads = prefix[stop] - prefix[part - 1 : stop]
                costs = np.where(loads <= limit, cost[part - 1 : stop] + loads * loads, np.inf)
                last = len(costs) - 1 - int(np.argmin(costs[::-1]))
                following[stop] = costs[last]
                choice[stop] = part - 1 + last
            cost = following
            choices.append(choice)
        bounds = [items]
        for choice in reversed(choices):
            bounds.append(choice[bounds[-1]])
        return cls(tuple(reversed(bounds)))

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Partition:
        """Part `i` holds `counts[i]` items."""
        if any(count < 0 for count in counts):
            raise ValueError(f"counts: {list(counts)} hold a negative number")
        return cls(tuple(accumulate(counts, initial=0)))

    @property
    def total(self) -> int:
        return self.bounds[-1]

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in pairwise(self.bounds))

    def start(self, part: int) -> int:
        return self.bounds[self._checked(part)]

    def stop(self, part: int) -> int:
        return self.bounds[self._checked(part) + 1]

    def count(self, part: int) -> int:
        return self.stop(part) - self.start(part)

    def slice(self, part: int) -> builtins.slice:
        return builtins.slice(self.start(part), self.stop(part))

    def owner(self, index: int) -> int:
        """The part that holds item `index`. Raises `ValueError` outside 0 .. total - 1."""
        if not 0 <= index < self.total:
            raise ValueError(f"index: {index} is outside the partition, expected 0 to {self.total - 1}")
        return bisect_right(self.bounds, index) - 1

    def _checked(self, part: int) -> int:
        if not 0 <= part < self.parts:
            raise ValueError(f"part: {part} is out of range, expected 0 to {self.parts - 1}")
        return part


def _check_parts(parts: int) -> None:
    if parts < 1:
        raise ValueError(f"parts: {parts} is out of range, expected at least 1")


def _smallest_maximum(prefix: np.ndarray, parts: int) -> float:
    """Least possible weight of the heaviest of `parts` non-empty contiguous parts."""
    items = len(prefix) - 1
    heaviest = np.full(items + 1, np.inf)
    heaviest[0] = 0.0
    for part in range(1, parts + 1):
        following = np.full(items + 1, np.inf)
        for stop in range(part, items + 1):
            loads = prefix[stop] - prefix[part - 1 : stop]
            following[stop] = np.maximum(heaviest[part - 1 : stop], loads).min()
        heaviest = following
    return float(heaviest[items])
