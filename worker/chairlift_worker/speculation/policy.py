"""Whether guesses pay: by how often they held, and by what a step with more tokens costs. Numbers only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# What is assumed of a request of which nothing is known: that so many of so many drafts held.
PRIOR_HELD: Final = 1.0
PRIOR_TESTED: Final = 2.0
# What an older step's drafts count for, beside the step after it.
FADE: Final = 0.9
# Steps for which a request whose drafts do not pay is left alone before it is tried again; twice as many each time...
FIRST_REST: Final = 16
LAST_REST: Final = 512
# ...until so much of its drafts holds.
TRUSTED: Final = 0.5
# By how much more tokens a second drafting has to promise to be begun, and to be gone on with.
BEGIN_GAIN: Final = 1.1
KEEP_GAIN: Final = 1.02


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs on this machine by its tokens, measured when the worker warms up."""

    sizes: tuple[int, ...]  # query tokens, rising; at least two
    costs_ns: tuple[float, ...]  # of these; they do not fall

    def of(self, num_tokens: int) -> float:
        """Nanoseconds, linear between the sizes that were measured and beyond them."""
        upper = min(max(bisect_left(self.sizes, num_tokens), 1), len(self.sizes) - 1)
        (low, high), (low_ns, high_ns) = self.sizes[upper - 1 : upper + 1], self.costs_ns[upper - 1 : upper + 1]
        return low_ns + (high_ns - low_ns) * (num_tokens - low) / (high - low)


ALWAYS_DRAFT: Final = StepCosts(sizes=(1, 2), costs_ns=(1.0, 1.0))


class Acceptance:
    """How far one request's drafts held."""

    __slots__ = ("_held", "_rest", "_resting", "_tested")

    def __init__(self) -> None:
        self._held = PRIOR_HELD
        self._tested = PRIOR_TESTED
        self._rest = FIRST_REST  # steps
        self._resting = 0  # steps passed over so far

    @property
    def chance(self) -> float:
        """With which a draft holds if those before it do; under 1."""
        return self._held / self._tested

    def note(self, *, num_drafts: int, num_held: int) -> None:
        """So many of a step's drafts held; the next one did not, and no more were looked at."""
        self._held = FADE * self._held + num_held
        self._tested = FADE * self._tested + min(num_drafts, num_held + 1)
        self._resting = 0
        if self.chance >= TRUSTED:
            self._rest = FIRST_REST

    def pass_over(self) -> None:
        """There was a guess, and it was not worth a try. After a rest the past is forgotten."""
        self._resting += 1
        if self._resting >= self._rest:
            self._resting = 0
            self._rest = min(2 * self._rest, LAST_REST)
            self._held, self._tested = PRIOR_HELD, PRIOR_TESTED


@dataclass(frozen=True, slots=True)
class Offer:
    """What one request could have checked in a step."""

    num_tokens: int
    chance: float  # that a token holds if those before it do


class DraftPolicy:
    """Shares a step's room out among offers, the likeliest first, as long as tokens come faster for it.

    It remembers whether the last step had drafts: to begin takes more than to go on, so that it does not go to and fro.
    """

    def __init__(self, *, costs: StepCosts) -> None:
        self._costs = costs
        self._drafting = False

    def share_out(self, offers: Sequence[Offer], *, num_tokens: int, num_rows: int, room: int) -> list[int]:
        """How many tokens each offer gets, `room` in all, in a step of `num_tokens` without them.

        `num_rows` is how many tokens that step brings.
        """
        chances: list[tuple[float, int]] = []
        for number, offer in enumerate(offers):
            chance = 1.0
            for _ in range(offer.num_tokens):
                chance *= offer.chance
                chances.append((chance, number))
        chances.sort(key=lambda entry: -entry[0])
        of = self._costs.of
        best, best_count, gained = num_rows / of(num_tokens), 0, float(num_rows)
        needed = best * (KEEP_GAIN if self._drafting else BEGIN_GAIN)
        for count, (chance, _) in enumerate(chances[:room], start=1):
            gained += chance
            rate = gained / of(num_tokens + count)
            if rate > best:
                best, best_count = rate, count
        self._drafting = best_count > 0 and best >= needed
        shares = [0] * len(offers)
        if self._drafting:
            for _, number in chances[:best_count]:
                shares[number] += 1
        return shares
