"""An output's text up to its first stop string."""

from __future__ import annotations

from chairlift_service.text.detokenizer import Detokenizer
from chairlift_service.text.stops import StopMatcher


class StoppingText:
    """A detokenizer whose text ends at a stop string; see OutputLog for how it is used."""

    def __init__(self, *, detokenizer: Detokenizer, matcher: StopMatcher, min_new_tokens: int, told: bool) -> None:
        """Stops that fewer than `min_new_tokens` tokens complete are let be. Not `told`: it only looks for stops."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_new_tokens = min_new_tokens
        self._told = told
        self._num_tokens = 0

    @property
    def found(self) -> str | None:
        """The stop string that the text has ended at."""
        return self._matcher.found

    def push(self, token_id: int) -> str:
        """Text that is certain with this token."""
        self._num_tokens += 1
        piece = self._matcher.push(self._detokenizer.push(token_id), counts=self._counts)
        return piece if self._told else ""

    def finish(self) -> str:
        """Text that was held back. It may complete a stop, too."""
        piece = self._matcher.push(self._detokenizer.finish(), counts=self._counts) + self._matcher.finish()
        return piece if self._told else ""

    @property
    def _counts(self) -> bool:
        return self._num_tokens >= self._min_new_tokens
