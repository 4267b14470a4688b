"""Stop strings, against a search in the joined text (C25)."""

from __future__ import annotations

import random

import pytest

from spmd.text.stop import StopStrings

PIECES = ["AB", "C D", "EF", "GH", "I J"]


def shown(stops: StopStrings, pieces: list[str]) -> list[str]:
    return [*(stops.push(piece) for piece in pieces), stops.finish()]


def test_a_stop_across_pieces_and_inside_them() -> None:
    stops = StopStrings(["DEFGHI"])
    deltas = shown(stops, PIECES)
    assert deltas == ["AB", "C ", "", "", "", ""]
    assert stops.matched == "DEFGHI"


def test_include_the_stop_and_nothing_after_it() -> None:
    stops = StopStrings(["DEFGHI"], include_in_output=True)
    assert "".join(shown(stops, PIECES)) == "ABC DEFGHI"


def test_only_a_real_start_of_a_stop_is_held() -> None:
    stops = StopStrings(["DEX"])
    assert shown(stops, PIECES) == ["AB", "C ", "DEF", "GH", "I J", ""]
    assert stops.matched is None


def test_what_is_held_at_the_end_is_released() -> None:
    stops = StopStrings(["I JK", "END"])
    assert shown(stops, PIECES) == ["AB", "C D", "EF", "GH", "", "I J"]


@pytest.mark.parametrize(
    ("stops", "matched", "text"),
    [
        (["GH", "EF"], "EF", "ABC D"),  # complete first
        (["EFGHI", "FG"], "FG", "ABC DE"),  # complete first although it starts later
        (["EF", "DEF"], "DEF", "ABC "),  # complete at once: the longest
        (["J", "I J", "H"], "H", "ABC DEFG"),
    ],
)
def test_the_stop_that_is_complete_first_wins(stops: list[str], matched: str, text: str) -> None:
    finder = StopStrings(stops)
    assert "".join(shown(finder, PIECES)) == text
    assert finder.matched == matched


def test_after_a_match_nothing_is_shown() -> None:
    stops = StopStrings(["C"])
    assert [stops.push("ABCD"), stops.push("E"), stops.finish()] == ["AB", "", ""]


def test_no_stops() -> None:
    assert shown(StopStrings(()), PIECES) == [*PIECES, ""]


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["A", ""])


@pytest.mark.parametrize("include", [False, True])
def test_random_text_in_random_pieces(include: bool) -> None:
    generator = random.Random(int(include))
    for _ in range(5000):
        text = "".join(generator.choices("ab ", k=generator.randrange(0, 30)))
        stops = ["".join(generator.choices("ab ", k=generator.randrange(1, 6))) for _ in range(3)]
        pieces, rest = [], text
        while rest:
            size = generator.randrange(0, 6)
            pieces.append(rest[:size])
            rest = rest[size:]
        finder = StopStrings(stops, include)
        deltas = [finder.push(piece) for piece in pieces]
        longest = max(map(len, stops))
        so_far = "".join(deltas)
        if finder.matched is None:
            assert len(text) - len(so_far) < longest
        ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
        if not ends:
            assert so_far + finder.finish() == text
            continue
        matched = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert finder.matched == matched
        assert so_far + finder.finish() == text[: ends[0] if include else ends[0] - len(matched)]
