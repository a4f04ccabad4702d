"""Requests that begin with what another one has computed of the same prompt: the further choices of a request.

Full pages are shared, the last, partly filled one is copied: both write behind the prompt, each to its own. So a fork
computes the prompt's last token only, from whose logits its first one is chosen.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.kv.prefix import NamedPage
from chairlift_worker.plan import Moves
from chairlift_worker.request import Request, RequestState
from chairlift_worker.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Fork:
    """What a request can begin with, as `PrefixMatch` tells it."""

    source: Request
    num_tokens: int
    num_pages: int  # that need not be taken
    being_computed: bool  # it is worth a short wait
    pages: tuple[NamedPage, ...] = ()  # of the source, so none of them can be taken by others


class Forks:
    """Lets forks rest while their source's prompt is computed, and begin with its pages afterwards.

    A source that is gone, gave its pages up, is held, or whose window has moved on has nothing to give: its forks
    compute their prompt like anybody else. Rests outside of the waiting queue's order: see `WaitingQueue`.
    """

    def __init__(self, *, memory: PagedMemory, held: AbstractSet[int]) -> None:
        self.resting: set[int] = set()  # uids
        self._memory = memory
        self._held = held
        self._by_source: dict[int, list[int]] = {}
        self._copies: list[tuple[int, int]] = []  # (sector, sector), for the next plan

    def rest(self, request: Request, source: Request) -> None:
        """Lets a fork that comes in rest, if its source is about to compute the prompt for the first time."""
        begins = source.state in {RequestState.WAITING, RequestState.PREFILLING} and not source.progress.preemptions
        if begins and source.uid not in self._held and source.computed < _shared_len(request):
            self.resting.add(request.uid)
            self._by_source.setdefault(source.uid, []).append(request.uid)

    def wake(self, source_uid: int, waiting: WaitingQueue) -> None:
        """Lets the forks of a source rest no more: its prompt is computed, or will not be soon."""
        for uid in self._by_source.pop(source_uid, ()):
            if uid in self.resting:
                self.resting.remove(uid)
                waiting.push_again(uid)

    def find(self, request: Request, source: Request | None) -> Fork | None:
        """What a waiting fork can begin with, now or soon; None if it has to compute its prompt."""
        num_tokens = _shared_len(request)
        if source is None or not source.table.sectors or source.uid in self._held or not num_tokens:
            return None
        if request.saved is not None or (self._memory.sharing and request.num_generated):
            return None  # the swap pool, or the cache, has as much of it
        num_pages = 0
        for group, first in zip(self._memory.layout.groups, source.table.first, strict=True):
            needed = group.first_needed(num_tokens)
            if first > needed:
                return None
            num_pages += num_tokens // group.sector_len - needed
        is_there = source.computed >= num_tokens and source.table.is_settled
        return Fork(source=source, num_tokens=num_tokens, num_pages=num_pages, being_computed=not is_there)

    def begin(self, request: Request, fork: Fork) -> None:
        """Gives the request its pages, and plans the copies. The pages must be available."""
        self._copies += self._memory.fork(request, fork.source, fork.num_tokens)

    def take_copies(self, moves: Moves) -> Moves:
        """These moves, with the copies planned since the last time."""
        if not self._copies:
            return moves
        copies, self._copies = tuple(self._copies), []
        return replace(moves, copies=copies)

    def check(self) -> None:
        """Raises AssertionError unless whoever rests has a source that will wake it."""
        known = {uid for uids in self._by_source.values() for uid in uids}
        assert self.resting <= known, "a fork rests that nobody will wake"


def _shared_len(request: Request) -> int:
    """Tokens that a fork need not compute: all of the prompt but its last."""
    return request.prompt_len - 1
