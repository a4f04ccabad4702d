"""Where an output's text ends: at the first of its stop strings that is complete."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in text that comes in pieces, and lets through what cannot be of one.

    The first that is complete counts; of several that are complete at the same character the longest. So it makes no
    difference where the text is cut into pieces.
    """

    __slots__ = ("_held", "_include", "_stops", "found")

    def __init__(self, *, stops: Sequence[str], include: bool) -> None:
        """None of `stops` may be empty. `include`: let the stop itself through."""
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._held = ""  # the beginning of a stop, perhaps
        self.found: str | None = None

    def copy(self) -> StopMatcher:
        """Another one that has come as far."""
        other = StopMatcher(stops=self._stops, include=self._include)
        other._held, other.found = self._held, self.found
        return other

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
        starts = [(text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start, stop) for start, stop in starts if start >= 0]
        return min(found, key=lambda each: (each[0] + len(each[1]), each[0])) if found else None

    def _num_open(self, text: str) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop."""
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
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
