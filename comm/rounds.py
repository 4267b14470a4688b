"""Cutting a collective with uneven counts into rounds of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def rounds(counts: Sequence[int], limit: int) -> Iterator[list[tuple[int, int]]]:
    """For each round, every rank's (start, stop) within its own count; no span is longer than `limit`.

    All ranks hold the same counts, so all make as many rounds; a rank that is done has empty spans.
    """
    for low in range(0, max(counts), limit):
        yield [(min(count, low), min(count, low + limit)) for count in counts]
