"""Where an output's text ends: at the first of its stop strings that is complete."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in text that comes in pieces, and lets through what cannot be of one.

    The first that is complete counts; of several that are complete at the same character the longest. So it makes no
    difference where the text is cut into pieces. A character costs the more the more stops end with it; most cost next
    to nothing.
    """

    __slots__ = ("_by_end", "_firsts", "_held", "_include", "_longest", "_ordered", "found")

    def __init__(self, *, stops: Sequence[str], include: bool) -> None:
        """None of `stops` may be empty. `include`: let the stop itself through."""
        self._ordered = sorted(set(stops))
        self._longest = max(map(len, stops))
        self._firsts = frozenset(stop[0] for stop in stops)
        self._by_end: dict[str, list[str]] = {}  # stops by their last character, the longest first
        for stop in sorted(self._ordered, key=len, reverse=True):
            self._by_end.setdefault(stop[-1], []).append(stop)
        self._include = include
        self._held = ""  # the beginning of a stop, perhaps
        self.found: str | None = None

    def copy(self) -> StopMatcher:
        """Another one that has come as far."""
        return copy.copy(self)

    def push(self, piece: str, *, counts: bool = True) -> str:
        """The text that is certain with this piece: nothing that comes later can make it a part of a stop.

        Stops that are complete with this piece are let be, unless `counts`. After one was found nothing comes.
        """
        if self.found is not None:
            return ""
        before, text = len(self._held), self._held + piece
        if counts and (place := self._first_complete(text, before)):
            start, self.found = place
            self._held = ""
            return text[: start + len(self.found)] if self._include else text[:start]
        num_held = self._num_open(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text is over: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str, before: int) -> tuple[int, str] | None:
        """Where the first stop begins that ends behind the first `before` characters, and which one it is."""
        for end in range(before + 1, len(text) + 1):
            for stop in self._by_end.get(text[end - 1], ()):
                if text.endswith(stop, 0, end):
                    return end - len(stop), stop
        return None

    def _num_open(self, text: str) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                # What begins with it, and is longer, stands directly behind it.
                place = bisect.bisect_right(self._ordered, end)
                if place < len(self._ordered) and self._ordered[place].startswith(end):
                    return len(end)
        return 0


class StopSearch:
    """Looks for stop strings in an output's text, of which some is likely before it is certain.

    A stop that is complete in likely text ends the output, which makes that text certain.
    """

    __slots__ = ("_ahead", "_likely", "_matcher", "_told")

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher = matcher
        self._ahead: StopMatcher | None = None  # has had what is likely besides; None: nothing is
        self._likely = ""
        self._told = ""  # what `_ahead` let through of it

    @property
    def found(self) -> str | None:
        """The first stop in what is certain."""
        return self._matcher.found

    @property
    def ends_here(self) -> bool:
        """Whether there is one in what is likely."""
        return self._ahead is not None and self._ahead.found is not None

    def push(self, piece: str, *, likely: str = "", counts: bool = True) -> str:
        """What `StopMatcher.push` returns for text that is certain now; behind that, `likely` is more."""
        told = ""
        if piece:
            if self._ahead is not None and piece.startswith(self._likely):
                self._matcher, told, piece = self._ahead, self._told, piece[len(self._likely) :]
            self._ahead, self._likely, self._told = None, "", ""
            told += self._matcher.push(piece, counts=counts)
        if likely and self.found is None:
            self._ahead = self._ahead or self._matcher.copy()
            self._told += self._ahead.push(likely, counts=counts)
            self._likely += likely
        return told

    def finish(self) -> str:
        """The text is over: what was held back."""
        return self._matcher.finish()
