"""Who is here: requests waiting and active, how they come in, start, give way, and leave."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.kv.sharing import PrefixMatch
from chairlift_worker.outbox import Outbox
from chairlift_worker.request import Request, RequestState
from chairlift_worker.waiting import WaitingQueue


@dataclass(slots=True)
class Counters:
    """Counts since the start; the names are those of the statistics that users see."""

    generated_tokens: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions_recompute: int = 0


class Roster:
    """Owns the worker's requests: each is waiting, without pages, or active, with pages."""

    def __init__(self, *, memory: PagedMemory) -> None:
        self.memory = memory
        self.outbox = Outbox()
        self.counters = Counters()
        self.waiting = WaitingQueue()
        self.active: dict[int, Request] = {}
        self._requests: dict[int, Request] = {}
        self._deadlines: list[tuple[int, int]] = []  # heap of (deadline_ns, uid)

    def add(self, request: Request) -> None:
        """Takes a request in."""
        self._requests[request.uid] = request
        self.waiting.push(request)
        if request.has_deadline:
            heapq.heappush(self._deadlines, (request.params.deadline_ns, request.uid))

    def get(self, uid: int) -> Request | None:
        """The request, unless it is over."""
        return self._requests.get(uid)

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

    def start(self, request: Request, match: PrefixMatch, now_ns: int) -> None:
        """A waiting request joins the batch, with the pages that the cache has of it."""
        request.become(RequestState.PREFILLING)
        self.waiting.discard(request.uid)
        self.active[request.uid] = request
        self.memory.attach(request, match)
        progress = request.progress
        if not progress.started_ns:
            progress.started_ns = now_ns
            progress.cached_tokens = request.computed
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_prompt_tokens += request.computed

    def preempt(self, request: Request) -> None:
        """Takes a request's pages; it waits at its old place and is computed again, but for what is still cached."""
        self._make_wait(request)
        request.progress.preemptions += 1
        self.counters.preemptions_recompute += 1

    def give_up_computed(self) -> int:
        """Takes every active request's pages, since what they hold is of no use any more; returns their number.

        They wait at their old places and are computed again from their tokens. Nobody preempted them, so it does not
        count as if somebody had.
        """
        requests = list(self.active.values())
        for request in requests:
            self._make_wait(request)
        return len(requests)

    def end(self, request: Request, reason: EndingReason, now_ns: int, error: str = "") -> None:
        """Lets the request and its pages go, and tells of it."""
        del self._requests[request.uid]
        self.waiting.discard(request.uid)
        if self.active.pop(request.uid, None) is not None:
            self.memory.release(request)
        request.become(RequestState.FINISHED)
        self.outbox.ending(request, reason, now_ns, error)

    def _make_wait(self, request: Request) -> None:
        del self.active[request.uid]
        self.memory.release(request)
        request.become(RequestState.WAITING)
        self.waiting.push(request)

    def check(self) -> None:
        """Raises AssertionError unless every owner's books agree."""
        self.memory.check(self.active.values())
        assert len(self.waiting) + len(self.active) == len(self._requests), "a request is in no queue, or in two"
        for request in self._requests.values():
            if request.uid in self.active:
                assert request.state in {RequestState.PREFILLING, RequestState.DECODING}, f"{request.uid} is active"
            else:
                assert request.state is RequestState.WAITING, f"{request.uid} waits"
                assert not request.table.sectors, f"request {request.uid} waits and holds pages"
        if not self.active:
            assert self.memory.index.num_promised == 0, "nobody is there to keep a promise"
