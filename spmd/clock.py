"""Where a rank's time goes: nested spans, each second counted once, under the innermost span's name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from spmd.comm.group import Group
from spmd.comm.window import ReductionWindow

COMPUTE, WAIT, HOST = "compute", "wait", "host"


_NOTHING = nullcontext()


class Clock:
    """Measures nothing: the form of a clock that is off."""

    def span(self, kind: str, size: int = 0) -> AbstractContextManager[None]:
        """Count the block's time, less that of spans inside it, under `kind`; `size` in bytes."""
        return _NOTHING


class StepClock(Clock):
    """Seconds, calls and bytes by kind: `compute`, `wait` (for another stage), `host`, or a collective."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        self._inner: list[float] = []  # for each open span, the seconds its inner spans took

    def span(self, kind: str, size: int = 0) -> AbstractContextManager[None]:
        return self._measure(kind, size)

    @contextmanager
    def _measure(self, kind: str, size: int) -> Iterator[None]:
        self._inner.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - began
            self.seconds[kind] += elapsed - self._inner.pop()
            self.calls[kind] += 1
            self.bytes[kind] += size
            if self._inner:
                self._inner[-1] += elapsed

    def count(self, kind: str, seconds: float, calls: int, size: int) -> None:
        """Count what was measured otherwise, inside the innermost open span."""
        self.seconds[kind] += seconds
        self.calls[kind] += calls
        self.bytes[kind] += size
        if self._inner:
            self._inner[-1] += seconds

    def reset(self) -> None:
        """Start counting from nothing."""
        self.seconds.clear()
        self.calls.clear()
        self.bytes.clear()


class MeasuredGroup:
    """A `Group` whose collectives are counted by a clock. Everything else is the group's own."""

    def __init__(self, group: Group, clock: StepClock) -> None:
        self._group = group
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def reduction_window(self, part_bytes: int) -> ReductionWindow | None:
        window = self._group.reduction_window(part_bytes)
        if window is None:
            return None
        began, close = window.sequence, window.close

        def close_and_count(sequence: int, seconds: float) -> None:
            close(sequence, seconds)
            steps = sequence - began
            self._clock.count("all_reduce", seconds, steps, steps * part_bytes)

        window.close = close_and_count
        return window

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._clock.span("all_reduce", x.numel() * x.element_size()):
            return self._group.all_reduce(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        with self._clock.span("all_reduce_max", x.numel() * x.element_size()):
            return self._group.all_reduce_max(x)

    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        with self._clock.span("all_gather", x.numel() * x.element_size()):
            return self._group.all_gather(x, sizes, dim)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        with self._clock.span("broadcast", x.numel() * x.element_size()):
            return self._group.broadcast(x, root)
