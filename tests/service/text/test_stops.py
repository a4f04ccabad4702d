"""Where text ends: stop strings in text that comes in pieces, against `str.find` in the whole."""

from __future__ import annotations

import itertools

import pytest
from chairlift_service.text.stops import StopMatcher
from hypothesis import given
from hypothesis import strategies as st

STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop that is complete begins, looked for one character after the other."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@given(
    text=st.text(alphabet="ab\nc", max_size=30),
    stops=STOPS,
    cuts=st.lists(st.integers(0, 30), max_size=12),
    include=st.booleans(),
)
def test_text_is_cut_at_the_first_stop_wherever_it_is_cut_into_pieces(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """What is let through is always a beginning of the right text, and never lacks more than it must."""
    place = first_stop(text, stops)
    wanted = text if place is None else text[: place[0] + (len(place[1]) if include else 0)]
    matcher = StopMatcher(stops=stops, include=include)
    told, seen = "", ""
    borders = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for start, end in itertools.pairwise(borders):
        told += matcher.push(text[start:end])
        seen = text[:end]
        assert wanted.startswith(told)
        if matcher.found is None:
            held = seen.removeprefix(told)
            assert len(held) < max(map(len, stops))
            assert not held or any(stop.startswith(held) for stop in stops), "held for nothing"
    told += matcher.finish()
    assert (told, matcher.found) == (wanted, None if place is None else place[1])


@given(text=st.text(alphabet="ab", max_size=24), stops=STOPS, first=st.integers(0, 24))
def test_stops_that_are_complete_too_early_are_let_be(text: str, stops: list[str], first: int) -> None:
    """One character a token: a stop counts from the `first` character on, wherever it begins."""
    matcher = StopMatcher(stops=stops, include=False)
    told = "".join(matcher.push(char, counts=number >= first) for number, char in enumerate(text, start=1))
    wanted, found = text, None
    for end in range(max(first, 1), len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            found = max(complete, key=len)
            wanted = text[:end].removesuffix(found)
            break
    assert (told + matcher.finish(), matcher.found) == (wanted, found)


@pytest.mark.parametrize(
    ("pieces", "stops", "told", "found"),
    [
        (["a\n", "b"], ["\n\n"], ["a", "\nb"], None),  # a line's end that never becomes a stop is not lost
        (["aaab"], ["aab"], ["a"], "aab"),
        (["one two"], ["two", "one two"], [""], "one two"),  # complete at the same character: the longest
        (["xab", "c"], ["ab", "abc"], ["x", ""], "ab"),  # the one that is complete first
        (["xabcd"], ["bc", "abcd"], ["xa"], "bc"),
        (["e", "n", "d"], ["end"], ["", "", ""], "end"),
        (["e", "n"], ["end"], ["", ""], None),
    ],
)
def test_cases(pieces: list[str], stops: list[str], told: list[str], found: str | None) -> None:
    matcher = StopMatcher(stops=stops, include=False)
    assert ([matcher.push(piece) for piece in pieces], matcher.found) == (told, found)
    if found is None:
        assert "".join(told) + matcher.finish() == "".join(pieces)
    assert matcher.push("more") == "" or found is None
