"""Who is here: requests waiting and active, how they come in, start, give way, and leave."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from chairlift_worker.forks import Fork, Forks
from chairlift_worker.ipc.messages import EndingReason, Turn
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.kv.sharing import PrefixMatch
from chairlift_worker.outbox import Outbox
from chairlift_worker.request import Request, RequestState
from chairlift_worker.swap.space import SwapSpace
from chairlift_worker.waiting import WaitingQueue


@dataclass(slots=True)
class Counters:
    """Counts since the start; the names are those of the statistics that users see."""

    generated_tokens: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class Roster:
    """Owns the worker's requests: each is waiting, without pages, or active, with pages.

    A waiting request's pages may lie in the swap pool; it is SWAPPED then, and waits like any other. One that is held
    gets no tokens. It keeps its pages as long as nobody else can use them.
    """

    def __init__(self, *, memory: PagedMemory, swap: SwapSpace) -> None:
        self.memory = memory
        self.swap = swap
        self.outbox = Outbox()
        self.counters = Counters()
        self.held: set[int] = set()  # uids, waiting or active; this class changes it
        self.forks = Forks(memory=memory, held=self.held)
        self.preparing: set[int] = set()  # uids, waiting: something is being made for them; the engine changes it
        self.waiting = WaitingQueue(self.held, self.forks.resting, self.preparing)
        self.active: dict[int, Request] = {}
        self.num_swapped = 0
        self._requests: dict[int, Request] = {}
        self._deadlines: list[tuple[int, int]] = []  # heap of (deadline_ns, uid)

    def add(self, request: Request) -> None:
        """Takes a request in."""
        source = self._requests.get(request.params.fork_of)
        if source is not None:
            self.forks.rest(request, source)
        self._requests[request.uid] = request
        self.waiting.push(request)
        if request.has_deadline:
            heapq.heappush(self._deadlines, (request.params.deadline_ns, request.uid))

    def get(self, uid: int) -> Request | None:
        """The request, unless it is over."""
        return self._requests.get(uid)

    @property
    def going_on(self) -> Collection[Request]:
        """Active requests that are not held."""
        active = self.active.values()
        return [request for request in active if request.uid not in self.held] if self.held else active

    def hold(self, uid: int, *, held: bool) -> None:
        """Holds a request, or lets it go on; one that is over, or unknown, is let be."""
        request = self._requests.get(uid)
        if request is None:
            return
        if held:
            self.held.add(uid)
            self.forks.wake(uid, self.waiting)
        elif uid in self.held:
            self.held.discard(uid)
            if uid in self.waiting:
                self.waiting.push(request)

    def cancel(self, uid: int, now_ns: int) -> None:
        """Ends a request in any state; one that is over, or unknown, is let be."""
        request = self._requests.get(uid)
        if request is not None:
            self.end(request, EndingReason.CANCELLED, now_ns)

    def expire(self, now_ns: int) -> None:
        """Ends the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, uid = heapq.heappop(self._deadlines)
            request = self._requests.get(uid)
            if request is not None:
                self.end(request, EndingReason.DEADLINE, now_ns)

    def start(self, request: Request, match: PrefixMatch | Fork, now_ns: int) -> None:
        """A waiting request joins the batch, with the pages that the cache, or its source, has of it."""
        self.waiting.discard(request.uid)
        self.active[request.uid] = request
        if isinstance(match, Fork):
            self.forks.begin(request, match)
        elif request.saved:
            self.swap.restore(request, match, self.memory)
            self._leave_swap(request, now_ns)
        else:
            self.memory.attach(request, match)
        request.become(RequestState.PREFILLING)
        progress = request.progress
        if not progress.started_ns:
            progress.started_ns = now_ns
            progress.cached_tokens = request.computed
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_prompt_tokens += request.computed
        else:
            progress.note(Turn.RESUMED, now_ns)

    def preempt(self, request: Request, now_ns: int) -> None:
        """Takes a request's pages; it waits at its old place.

        What it has computed is copied to the swap pool if that pays and there is room; else it is computed again, but
        for what is still cached.
        """
        if self.swap.save(request, self.memory):
            self._make_wait(request, RequestState.SWAPPED)
            self.num_swapped += 1
            request.progress.swapped_at_ns = now_ns
            request.progress.note(Turn.SWAPPED, now_ns)
            self.counters.preemptions_swap += 1
        else:
            self._make_wait(request, RequestState.WAITING)
            request.progress.note(Turn.PREEMPTED, now_ns)
            self.counters.preemptions_recompute += 1
        request.progress.preemptions += 1

    def make_way(self, now_ns: int) -> bool:
        """Takes the pages of held requests if somebody waits; whether there were such."""
        if not self.held or self.waiting.first() is None:
            return False
        idle = [request for request in self.active.values() if request.uid in self.held]
        for request in idle:
            self.preempt(request, now_ns)
        return bool(idle)

    def give_up_computed(self, now_ns: int) -> int:
        """Takes all requests' pages, since what they hold is of no use any more; returns how many had some.

        They wait at their old places and are computed again from their tokens. Nobody preempted them, so it does not
        count as if somebody had.
        """
        active = list(self.active.values())
        for request in active:
            self._make_wait(request, RequestState.WAITING)
        swapped = [request for request in self._requests.values() if request.saved]
        for request in swapped:
            self.swap.drop(request)
            self._leave_swap(request, now_ns)
            request.become(RequestState.WAITING)
        return len(active) + len(swapped)

    def end(self, request: Request, reason: EndingReason, now_ns: int, error: str = "") -> None:
        """Lets the request and its pages go, and tells of it. With ERROR nobody finds these pages again."""
        del self._requests[request.uid]
        self.held.discard(request.uid)
        self.preparing.discard(request.uid)
        self.forks.resting.discard(request.uid)
        self.forks.wake(request.uid, self.waiting)
        self.waiting.discard(request.uid)
        sound = reason is not EndingReason.ERROR
        if self.active.pop(request.uid, None) is not None or not sound:  # pages may be left from before an eviction
            self.memory.release(request, sound=sound)
        if request.saved:
            self.swap.drop(request)
            self._leave_swap(request, now_ns)
        request.become(RequestState.FINISHED)
        self.outbox.ending(request, reason, now_ns, error)

    def _make_wait(self, request: Request, state: RequestState) -> None:
        del self.active[request.uid]
        self.memory.release(request)
        request.become(state)
        self.waiting.push(request)
        self.forks.wake(request.uid, self.waiting)

    def _leave_swap(self, request: Request, now_ns: int) -> None:
        self.num_swapped -= 1
        request.progress.swapped_ns += max(0, now_ns - request.progress.swapped_at_ns)

    def check(self) -> None:
        """Raises AssertionError unless every owner's books agree."""
        self.memory.check(self.active.values())
        self.swap.check(self._requests.values())
        assert len(self.waiting) + len(self.active) == len(self._requests), "a request is in no queue, or in two"
        for request in self._requests.values():
            if request.uid in self.active:
                assert request.state in {RequestState.PREFILLING, RequestState.DECODING}, f"{request.uid} is active"
            else:
                expected = RequestState.SWAPPED if request.saved else RequestState.WAITING
                assert request.state is expected, f"{request.uid} waits"
                assert not request.table.sectors, f"request {request.uid} waits and holds pages"
        assert self.held | self.preparing <= self._requests.keys(), "somebody is held who is not there"
        self.forks.check()
        assert self.forks.resting <= self._requests.keys(), "somebody rests who is not there"
        num_swapped = sum(request.saved is not None for request in self._requests.values())
        assert self.num_swapped == num_swapped, "swapped requests are counted wrongly"
        if not self.active:
            assert self.memory.index.num_promised == 0, "nobody is there to keep a promise"
