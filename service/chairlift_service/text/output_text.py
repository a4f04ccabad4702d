"""An output's text as it is told: behind the end of an echoed prompt, and up to its first stop string."""

from __future__ import annotations

from chairlift_service.text.detokenizer import Detokenizer
from chairlift_service.text.echo import OpenEnd
from chairlift_service.text.stops import StopMatcher, StopSearch


class OutputText:
    """A detokenizer whose text may end at a stop string; see OutputLog for how it is used.

    Stops are looked for in the output's own text: what is left of the prompt's passes by them. One that is complete if
    the output ends with the newest token does end it.
    """

    def __init__(
        self,
        *,
        detokenizer: Detokenizer,
        open_end: OpenEnd | None = None,
        matcher: StopMatcher | None = None,
        min_new_tokens: int = 0,
        told: bool = True,
    ) -> None:
        """Stops that fewer than `min_new_tokens` tokens complete are let be. Not `told`: it only looks for stops."""
        self._detokenizer = detokenizer
        self._open_end = open_end
        self._search = None if matcher is None else StopSearch(matcher)
        self._min_new_tokens = min_new_tokens
        self._told = told
        self._num_tokens = 0

    @property
    def found(self) -> str | None:
        """The stop string that the text has ended at."""
        return None if self._search is None else self._search.found

    def push(self, token_id: int) -> str:
        """Text that is certain with this token."""
        self._num_tokens += 1
        piece = self._detokenizer.push(token_id)
        text = "" if self._open_end is None else self._open_end.push(token_id, piece)
        text += self._up_to_stop(piece)
        if self._search is not None and self._search.ends_here:
            text += self._finish()
        return text if self._told else ""

    def finish(self) -> str:
        """Text that was held back. It may complete a stop, too."""
        text = self._finish()
        return text if self._told else ""

    def _finish(self) -> str:
        piece = self._detokenizer.finish()
        text = "" if self._open_end is None else self._open_end.finish(piece)
        text += self._up_to_stop(piece)
        return text if self._search is None else text + self._search.finish()

    def _up_to_stop(self, piece: str) -> str:
        if self._search is None:
            return piece
        counts = self._num_tokens >= self._min_new_tokens
        return self._search.push(piece, likely=self._detokenizer.likely, counts=counts)
