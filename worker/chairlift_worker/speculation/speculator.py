"""Which requests get which drafts in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift_worker.request import Request
from chairlift_worker.speculation.drafter import Drafter
from chairlift_worker.speculation.lookup import PromptLookup
from chairlift_worker.speculation.policy import DraftPolicy, Offer, StepCosts

# Tokens that a row of a step takes into its request's index, beside as many as it computes.
CATCH_UP: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """See the settings `speculative_tokens` and `speculative_ngram`."""

    num_tokens: int  # drafts of a request in a step, at most
    min_len: int  # tokens that a match has at least
    max_len: int  # and at most


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row that drafts could follow."""

    request: Request
    room: int  # drafts that its request may have, whatever it is worth


class Speculator:
    """Gives requests their drafters; alone writes a request's `drafter`."""

    def __init__(self, *, limits: DraftLimits, costs: StepCosts) -> None:
        self._limits = limits
        self._policy = DraftPolicy(costs=costs)

    def follow(self, request: Request, num_tokens: int) -> Drafter:
        """The request's drafter, which has taken in a little more of its text: what a step of `num_tokens` can bear."""
        drafter = request.drafter
        if drafter is None:
            limits = self._limits
            lookup = PromptLookup(min_len=limits.min_len, max_len=limits.max_len, num_tokens=request.max_total + 1)
            drafter = request.drafter = Drafter(lookup=lookup)
        drafter.lookup.catch_up(request.tokens, CATCH_UP + num_tokens)
        return drafter

    def draft(
        self, candidates: Sequence[Candidate], *, num_tokens: int, num_rows: int, room: int
    ) -> list[tuple[Request, tuple[int, ...]]]:
        """Drafts for those candidates that get some: `room` tokens in all.

        The step has `num_tokens` query tokens without them, and brings `num_rows` tokens.
        """
        found = []
        for candidate in candidates:
            request = candidate.request
            drafter = self.follow(request, 1)
            drafts = drafter.lookup.propose(request.tokens, min(candidate.room, self._limits.num_tokens))
            if drafts:
                found.append((request, drafter.acceptance, drafts))
        if not found:
            return []
        offers = [Offer(len(drafts), acceptance.chance) for _, acceptance, drafts in found]
        shares = self._policy.share_out(offers, num_tokens=num_tokens, num_rows=num_rows, room=room)
        given = []
        for (request, acceptance, drafts), share in zip(found, shares, strict=True):
            if share:
                given.append((request, drafts[:share]))
            else:
                acceptance.pass_over()
        return given
