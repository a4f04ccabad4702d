"""A session: the requests of one manager, and the one stream that brings all their events."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final

import grpc
from chairlift.v1 import generation_service_pb2

from chairlift_client import _errors
from chairlift_client.manager._output import GenerationOutput
from chairlift_client.manager._releaser import Releaser
from chairlift_client.manager._request import TrackedRequest

logger = logging.getLogger("chairlift_client.manager")

_TICK: Final = 1.0  # seconds of one wait; what it waits for is looked at again after each
_BACKOFF: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # seconds before each attempt to attach again; the last repeats
_HELD: Final = 5.0  # seconds after which an attached stream counts as good, though nothing came
_REPLAY_TIMEOUT: Final = 10.0  # seconds in which an attached stream must mention every live request

# Statuses that attaching again cannot mend; every other may be a connection's end.
_FINAL: Final = {
    grpc.StatusCode.ABORTED,  # another reader took over
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


class Session:
    """Reads the session's stream in a thread of its own and keeps what comes, until it is taken.

    A stream that breaks is attached again for `reconnect_timeout` seconds; tokens that come twice are dropped by
    their index. All state is guarded by one condition.
    """

    def __init__(self, *, name: str, result: Any, releaser: Releaser, reconnect_timeout: float) -> None:
        self.name: Final = name
        self._result = result
        self._releaser = releaser
        self._reconnect_timeout = reconnect_timeout
        self._changed = threading.Condition()
        self._requests: dict[str, TrackedRequest] = {}
        self._ready: dict[str, None] = {}  # ids with output to hand out, in order of arrival
        self._num_live = 0
        self._unconfirmed: set[str] = set()
        self._thread: threading.Thread | None = None
        self._call: Any = None
        self._ending = False
        self.failure: str | None = None
        """Why the session is lost, if it is."""

    @property
    def is_attached(self) -> bool:
        """Whether the reading thread runs."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def attach(self) -> None:
        """Begin to read."""
        with self._changed:
            self._ending = False
            self.failure = None
            self._thread = threading.Thread(target=self._read, name=f"chairlift-{self.name}", daemon=True)
            self._thread.start()

    def detach(self, *, timeout: float | None) -> bool:
        """End reading once no request is live. Waits for that, `timeout` seconds at most; whether it has happened."""
        with self._changed:
            self._ending = True
            if self._is_done() and self._call is not None:
                self._call.cancel()
            self._changed.notify_all()
        thread = self._thread
        end = None if timeout is None else time.monotonic() + timeout
        while thread is not None and thread.is_alive():
            left = _TICK if end is None else min(_TICK, end - time.monotonic())
            if left <= 0:
                return False
            thread.join(left)
        return True

    def register(self, requests: list[TrackedRequest]) -> None:
        """Expect events of these requests. Raises ValueError for an id that is known already."""
        self._releaser.wait_until_free([request.request_id for request in requests])
        with self._changed:
            ids = [request.request_id for request in requests]
            taken = [i for i in ids if i in self._requests] or [i for i in ids if ids.count(i) > 1]
            if taken:
                raise ValueError(f"request id {taken[0]!r} is in use")
            self._requests.update((request.request_id, request) for request in requests)
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

    def fail_live(self, error: str) -> None:
        """End every live request here with an error; what still comes of them is ignored."""
        with self._changed:
            for request in self._requests.values():
                if not request.is_over:
                    request.fail(error)
                    self._ended(request)
            self._changed.notify_all()

    def take(
        self, request_id: str | None, *, timeout: float | None, until_idle: bool = False
    ) -> GenerationOutput | None:
        """The next output, of any request or of one.

        Waits for it, `timeout` seconds at most. None: the time is over, or nothing can come any more, because the
        request is not known, reading has ended, or (`until_idle`) all requests have been handed out.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                found = request_id if request_id in self._ready else None
                if request_id is None:
                    found = next(iter(self._ready), None)
                if found is not None:
                    return self._hand_out(found)
                nothing_left = until_idle and not self._requests
                if (
                    nothing_left
                    or not self.is_attached
                    or (request_id is not None and request_id not in self._requests)
                ):
                    return None
                left = _TICK if end is None else min(_TICK, end - time.monotonic())
                if left <= 0:
                    return None
                self._changed.wait(left)

    def _hand_out(self, request_id: str) -> GenerationOutput:
        request = self._requests[request_id]
        output = request.next_output()
        del self._ready[request_id]
        if output.is_finished():
            del self._requests[request_id]
        elif request.has_output():
            self._ready[request_id] = None
        self._changed.notify_all()
        return output

    def _read(self) -> None:
        """Thread: read the stream, attach it again when it breaks, until the session ends or is lost."""
        attempts, broken_since = 0, 0.0
        while not self._is_done():
            began = time.monotonic()
            error, received = self._read_stream()
            if self._is_done():
                break
            now = time.monotonic()
            if received or now - began > _HELD or not attempts:
                attempts, broken_since = 0, now
            if error.code in _FINAL or now - broken_since > self._reconnect_timeout:
                self._lose(error)
                break
            logger.warning("the stream of session %s broke, attaching it again: %s", self.name, error)
            with self._changed:
                self._changed.wait_for(self._is_done, _BACKOFF[min(attempts, len(_BACKOFF) - 1)])
            attempts += 1
        with self._changed:
            self._changed.notify_all()

    def _is_done(self) -> bool:
        return self._ending and not self._num_live

    def _read_stream(self) -> tuple[_errors.ChairliftError, bool]:
        """Attach and read until the stream ends. Returns what it ended with, and whether anything came."""
        received = False
        request = generation_service_pb2.ResultRequest(session=self.name)
        with self._changed:
            if self._is_done():
                return _errors.CallCancelledError("ended", code=grpc.StatusCode.CANCELLED), False
            call = self._call = self._result(request)
            self._unconfirmed = {r.request_id for r in self._requests.values() if not r.is_over}
        watch = threading.Timer(_REPLAY_TIMEOUT, self._fail_unconfirmed)
        watch.daemon = True
        watch.start()
        try:
            for message in call:
                received = True
                self._receive(message)
        except grpc.RpcError as error:
            return _errors.from_rpc_error(error), received
        finally:
            watch.cancel()
        return _errors.ChairliftError("the stream ended", code=grpc.StatusCode.OK), received

    def _receive(self, message: generation_service_pb2.ResultResponse) -> None:
        """Note one event."""
        kind = message.WhichOneof("event")
        with self._changed:
            request = self._requests.get(message.request_id)
            self._unconfirmed.discard(message.request_id)
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
                self._ended(request)
                self._releaser.release(request.request_id)
            elif request.has_output():
                self._ready[request.request_id] = None
            self._changed.notify_all()

    def _ended(self, request: TrackedRequest) -> None:
        """Book a request's ending. Call it with the lock held."""
        self._num_live -= 1
        self._ready[request.request_id] = None
        if self._is_done() and self._call is not None:
            self._call.cancel()

    def _fail_unconfirmed(self) -> None:
        """Timer: requests that an attached stream does not mention are gone, with the service that knew them."""
        with self._changed:
            for request_id in self._unconfirmed:
                request = self._requests.get(request_id)
                if request is not None and not request.is_over:
                    request.fail("UNAVAILABLE: the service no longer knows this request")
                    self._ended(request)
            self._unconfirmed = set()
            self._changed.notify_all()

    def _lose(self, error: _errors.ChairliftError) -> None:
        """Give the session up."""
        logger.error("session %s is lost: %s", self.name, error)
        self.failure = str(error)
        self.fail_live(str(error))
