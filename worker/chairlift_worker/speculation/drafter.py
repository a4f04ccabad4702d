"""One request's guesses: where they come from, and what has become of them."""

from __future__ import annotations

from chairlift_worker.speculation.lookup import PromptLookup
from chairlift_worker.speculation.policy import Acceptance


class Drafter:
    """Belongs to its request from the first step that may have drafts on, and ends with it."""

    __slots__ = ("acceptance", "lookup")

    def __init__(self, *, lookup: PromptLookup) -> None:
        self.lookup = lookup
        self.acceptance = Acceptance()
