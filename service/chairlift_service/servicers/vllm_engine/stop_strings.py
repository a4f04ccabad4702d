"""Strings that end an output."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the first of some strings in a text that comes in pieces."""

    __slots__ = ("_num_kept", "_stops", "_tail")

    def __init__(self, stops: Sequence[str]) -> None:
        """None of `stops` may be empty."""
        self._stops = tuple(stops)
        self._num_kept = max(map(len, self._stops), default=1) - 1  # characters that may still become a stop
        self._tail = ""

    def __bool__(self) -> bool:
        return bool(self._stops)

    def push(self, piece: str) -> str | None:
        """The stop that this piece completes, the one that begins first if there are several; None if none."""
        text = self._tail + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        self._tail = text[max(0, len(text) - self._num_kept) :]
        return min(found, key=lambda each: each[0])[1] if found else None
