"""What has come of a session's requests, until it is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Final

from chairlift.v1 import generation_service_pb2

from chairlift_client import _errors
from chairlift_client.manager._output import GenerationOutput
from chairlift_client.manager._releaser import Releaser
from chairlift_client.manager._request import TrackedRequest

_TICK: Final = 1.0  # seconds of one wait; what it waits for is looked at again after each


class Inbox:
    """Requests by id, guarded by one condition: one thread puts events in, any may take outputs out."""

    def __init__(self, *, releaser: Releaser) -> None:
        self._releaser = releaser
        self._changed = threading.Condition()
        self._requests: dict[str, TrackedRequest] = {}
        self._ready: dict[str, None] = {}  # ids with output to hand out, in order of arrival
        self._num_live = 0
        self._is_open = False

    @property
    def num_live(self) -> int:
        """Requests whose ending has not come."""
        return self._num_live

    def set_open(self, *, is_open: bool) -> None:
        """Say whether events are being received; who waits while none are gets what is there, or None."""
        with self._changed:
            self._is_open = is_open
            self._changed.notify_all()

    def live_ids(self) -> set[str]:
        """Ids of the requests whose ending has not come."""
        with self._changed:
            return {request.request_id for request in self._requests.values() if not request.is_over}

    def register(self, requests: list[TrackedRequest]) -> None:
        """Expect events of these requests. Raises ValueError for an id that is in use."""
        ids = [request.request_id for request in requests]
        with self._changed:
            taken = [i for i in ids if i in self._requests] or [i for i in ids if ids.count(i) > 1]
            if taken:
                raise ValueError(f"request id {taken[0]!r} is in use")
            self._requests.update(zip(ids, requests, strict=True))
            self._num_live += len(requests)

    def unregister(self, requests: list[TrackedRequest]) -> None:
        """Expect nothing of these requests: the service refused them."""
        with self._changed:
            for request in requests:
                if self._requests.get(request.request_id) is request:
                    del self._requests[request.request_id]
                    self._ready.pop(request.request_id, None)
                    self._num_live -= not request.is_over
            self._changed.notify_all()

    def receive(self, message: generation_service_pb2.ResultResponse) -> None:
        """Note one event, and let the service's copy of a request go that is over.

        That is told before its output can be taken: who takes it may use the id again at once.
        """
        kind = message.WhichOneof("event")
        with self._changed:
            request = self._requests.get(message.request_id)
            if request is None or request.is_over:
                if kind in ("finished", "failed"):
                    self._releaser.release(message.request_id)
                return
            if kind == "delta":
                try:
                    request.extend(message.delta)
                except ValueError as error:
                    request.fail(f"the service skipped tokens: {error}")
            elif kind == "accepted":
                request.accept(message.accepted)
            elif kind == "finished":
                request.finish(message.finished)
            elif kind == "failed":
                request.fail(str(_errors.from_status(message.failed.status)))
            if request.is_over:
                self._num_live -= 1
                self._releaser.release(request.request_id)
            if request.has_output():
                self._ready[request.request_id] = None
                self._changed.notify_all()

    def fail(self, request_ids: Iterable[str], error: str) -> None:
        """End those of the requests that are live with an error; what still comes of them is ignored."""
        with self._changed:
            for request_id in request_ids:
                request = self._requests.get(request_id)
                if request is not None and not request.is_over:
                    request.fail(error)
                    self._num_live -= 1
                    self._ready[request_id] = None
            self._changed.notify_all()

    def take(
        self, request_id: str | None, *, timeout: float | None, until_idle: bool = False
    ) -> GenerationOutput | None:
        """The next output, of any request or of one.

        Waits for it, `timeout` seconds at most. None: the time is over, or nothing can come any more, because the
        request is not known, nothing is being received, or (`until_idle`) all requests have been handed out.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                wanted = next(iter(self._ready), None) if request_id is None else request_id
                if wanted in self._ready:
                    return self._hand_out(wanted)
                is_known = bool(self._requests) or not until_idle if request_id is None else wanted in self._requests
                left = _TICK if end is None else min(_TICK, end - time.monotonic())
                if not is_known or not self._is_open or left <= 0:
                    return None
                self._changed.wait(left)

    def _hand_out(self, request_id: str) -> GenerationOutput:
        """The request's next output; of several ready ones it goes to the end of the line."""
        request = self._requests[request_id]
        output = request.next_output()
        del self._ready[request_id]
        if output.is_finished():
            del self._requests[request_id]
            self._changed.notify_all()
        elif request.has_output():
            self._ready[request_id] = None
        return output
