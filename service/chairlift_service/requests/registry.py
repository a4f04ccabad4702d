"""All generations that the service holds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from chairlift_worker.ipc.messages import EndingMsg

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.requests.admission import Admission
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.kept import Departed, KeptResults
from chairlift_service.requests.readers import Readers
from chairlift_service.requests.request_tracer import RequestTracer


class Registry:
    """Generations by uid while the worker may still speak of them; their heads by id and session while anybody may ask.

    ```
    add -> live --- confirm (the worker's EndingMsg) ---> detached: kept -- ttl, memory, Cancel, same id --> departed
                                                      '-> owned by a call, or unwanted: departed
    ```
    An ended generation stays live until the worker confirms it, so that late output always finds its owner. A request
    is live as long as one of its choices is.
    """

    def __init__(
        self, *, admission: Admission, kept: KeptResults, readers: Readers, tracer: RequestTracer | None = None
    ) -> None:
        self._admission = admission
        self._kept = kept
        self._readers = readers
        self._tracer = tracer
        self.departed = Departed()
        self._paused = False
        self._live: dict[int, Generation] = {}
        self._by_id: dict[str, Generation] = {}
        self._by_session: defaultdict[str, dict[int, Generation]] = defaultdict(dict)

    def __len__(self) -> int:
        """Requests held, kept results included."""
        return len(self._by_id)

    @property
    def num_live(self) -> int:
        """Generations whose ending the worker has not confirmed."""
        return len(self._live)

    def add(self, generation: Generation) -> None:
        """Takes a generation that the worker was sent; a request's head first, whose id must be free."""
        if generation is generation.head:
            before = self._by_id.get(generation.request_id)
            if before is not None:
                self.let_go(before)
            self._by_id[generation.request_id] = generation
            if generation.request.session:
                self._by_session[generation.request.session][generation.uid] = generation
            for reader in self._readers.of(generation):
                reader.follow(generation)
        generation.paused = self._paused
        self._live[generation.uid] = generation
        self._admission.enter(generation)

    def live(self, uid: int) -> Generation | None:
        """The generation that the worker calls `uid`; None if its ending is confirmed."""
        return self._live.get(uid)

    def all_live(self) -> list[Generation]:
        """Generations whose ending the worker has not confirmed, in the order in which they came."""
        return list(self._live.values())

    def find(self, request_id: str) -> Generation | None:
        """The head of the request of this id, live or kept."""
        self.sweep()
        return self._by_id.get(request_id)

    def of_session(self, session: str) -> list[Generation]:
        """Heads of a session's requests, live and kept, oldest first."""
        self.sweep()
        return list(self._by_session.get(session, {}).values())

    def start(self, generation: Generation, cached_tokens: int) -> None:
        """The worker began to compute it."""
        generation.start(cached_tokens)
        self._admission.leave(generation)

    def confirm(self, generation: Generation, ending: EndingMsg | ServiceError) -> list[Generation]:
        """The worker is done with it, or is gone: its readers get `ending` if they have none.

        Once that is so of all choices the result is kept if wanted; who reads it by now holds it, and gets it whole in
        any case. Returns the choices that fail with it and that the worker still has.
        """
        generation.end(ending)
        self._admission.leave(generation)
        del self._live[generation.uid]
        fault, head = generation.ending, generation.head
        failed = [each for each in generation.family if isinstance(fault, ServiceError) and each.end(fault)]
        if not is_live(self, head):
            if head.detached and not head.unwanted:
                self._kept.keep(head, now_ns=time.monotonic_ns())
                self.sweep()
            else:
                self._forget(head)
        return failed

    def let_go(self, generation: Generation) -> None:
        """Forgets a kept result."""
        self._kept.let_go(generation)
        self._forget(generation)

    def sweep(self) -> None:
        """Forgets kept results that are too old or too many. Cheap if there are none."""
        for generation in self._kept.take_surplus(now_ns=time.monotonic_ns()):
            self._forget(generation)

    def show_paused(self, *, paused: bool) -> None:
        """Whether live generations, and those to come, show as paused."""
        if paused is not self._paused:
            self._paused = paused
            for generation in self._live.values():
                generation.paused = paused

    def fail(self, generation: Generation, error: ServiceError) -> None:
        """Ends a live generation, of which no worker will tell anything any more."""
        if self._tracer is not None:
            self._tracer.lost(generation, error)
        for ended in (generation, *self.confirm(generation, error)):
            self._readers.notify(ended)

    def _forget(self, generation: Generation) -> None:
        self.departed.add(generation)
        if self._by_id.get(generation.request_id) is generation:
            del self._by_id[generation.request_id]
        session = generation.request.session
        if session:
            self._by_session[session].pop(generation.uid, None)
            if not self._by_session[session]:
                del self._by_session[session]


def is_live(registry: Registry, generation: Generation) -> bool:
    """Whether the worker may still speak of one of its request's choices."""
    return any(registry.live(choice.uid) is not None for choice in generation.choices)


def fail_all(registry: Registry, readers: Readers, error: ServiceError) -> None:
    """Ends every live generation, and every open reader: there is no worker any more, or the service is going."""
    for generation in registry.all_live():
        registry.fail(generation, error)
    readers.end_all(error)


def check_free(registry: Registry, request_ids: Iterable[str]) -> None:
    """Raises ServiceError with DUPLICATE_REQUEST_ID if one of these ids is taken, or stands there twice.

    The id of a kept result is free: adding a request under it lets the result go.
    """
    seen: set[str] = set()
    for request_id in request_ids:
        generation = registry.find(request_id)
        if request_id in seen or (generation is not None and is_live(registry, generation)):
            raise ServiceError(Reason.DUPLICATE_REQUEST_ID, f"request {request_id!r} is live")
        seen.add(request_id)


def readable(registry: Registry, request_id: str) -> Generation:
    """The head of the detached request of this id. Raises ServiceError: REQUEST_NOT_FOUND or RESULT_EXPIRED."""
    generation = registry.find(request_id)
    if generation is None:
        if registry.departed.was_kept(request_id):
            raise ServiceError(Reason.RESULT_EXPIRED, f"the result of request {request_id!r} is no longer kept")
        raise ServiceError(Reason.REQUEST_NOT_FOUND, f"there is no request {request_id!r}")
    if not generation.detached:
        raise ServiceError(Reason.REQUEST_NOT_FOUND, f"request {request_id!r} is read by the call that added it")
    return generation
