"""Slices of a tensor, as (start, stop) of every dimension."""

from __future__ import annotations

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]


def slice_bounds(shape: tuple[int, ...], index: Index | None) -> Bounds:
    """(start, stop) for every dimension of `shape`.

    Unlike Python's own slicing nothing is clamped: a slice that leaves the shape is a program fault.
    """
    index = index or ()
    if len(index) > len(shape):
        raise IndexError(f"{len(index)} slices for a tensor of shape {list(shape)}")
    bounds = []
    for dim, size in enumerate(shape):
        part = index[dim] if dim < len(index) else slice(None)
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise IndexError(f"slice {part} of dimension {dim} does not fit the shape {list(shape)}")
        bounds.append((start, stop))
    return tuple(bounds)


def bounds_shape(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)
