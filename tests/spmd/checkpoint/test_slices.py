from __future__ import annotations

import pytest

from spmd.checkpoint.slices import slice_bounds


def test_dimensions_not_mentioned_are_whole() -> None:
    assert slice_bounds((4, 6), None) == ((0, 4), (0, 6))
    assert slice_bounds((4, 6), (slice(1, 3),)) == ((1, 3), (0, 6))
    assert slice_bounds((4, 6), (slice(None), slice(2, None))) == ((0, 4), (2, 6))
    assert slice_bounds((), None) == ()


@pytest.mark.parametrize("part", [slice(0, 5), slice(-1, 2), slice(3, 2), slice(0, 4, 2)])
def test_a_slice_outside_the_shape_is_not_clamped(part: slice) -> None:
    with pytest.raises(IndexError, match=r"dimension 0 does not fit the shape \[4, 6\]"):
        slice_bounds((4, 6), (part,))


def test_more_slices_than_dimensions() -> None:
    with pytest.raises(IndexError, match="2 slices"):
        slice_bounds((4,), (slice(None), slice(None)))
