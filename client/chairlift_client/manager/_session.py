"""A session: the one stream that brings all events of a manager's requests."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final

import grpc
from chairlift.v1 import generation_service_pb2

from chairlift_client import _errors
from chairlift_client.manager._inbox import Inbox

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
    """Reads the session's stream into the inbox, in a thread of its own.

    A stream that breaks is attached again, for `reconnect_timeout` seconds; what the service then sends a second time
    the inbox drops by its index. `result` is the API's call.
    """

    def __init__(self, *, name: str, result: Any, inbox: Inbox, reconnect_timeout: float) -> None:
        self.name: Final = name
        self._result = result
        self._inbox = inbox
        self._reconnect_timeout = reconnect_timeout
        self._lock = threading.Lock()  # guards the three below
        self._call: Any = None
        self._is_ending = False
        self._unconfirmed: set[str] = set()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        """Why the session is lost, if it is."""

    @property
    def is_attached(self) -> bool:
        """Whether the reading thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def attach(self) -> None:
        """Begin to read."""
        self._is_ending = False
        self._wake.clear()
        self.failure = None
        self._inbox.set_open(is_open=True)
        self._thread = threading.Thread(target=self._run, name=f"chairlift-{self.name}", daemon=True)
        self._thread.start()

    def detach(self, *, timeout: float | None) -> bool:
        """End reading once no request is live.

        Waits for that, `timeout` seconds at most. Returns whether it has happened.
        """
        with self._lock:
            self._is_ending = True
        end = None if timeout is None else time.monotonic() + timeout
        while self._thread is not None and self._thread.is_alive():
            self._end_if_done()
            left = _TICK if end is None else min(_TICK, end - time.monotonic())
            if left <= 0:
                return False
            self._thread.join(left)
        return True

    def _is_done(self) -> bool:
        return self._is_ending and not self._inbox.num_live

    def _end_if_done(self) -> None:
        with self._lock:
            if self._is_done():
                self._wake.set()
                if self._call is not None:
                    self._call.cancel()

    def _run(self) -> None:
        """Thread: read the stream, attach it again when it breaks, until the session ends or is lost."""
        attempts, broken_since = 0, 0.0
        try:
            while not self._is_done():
                began = time.monotonic()
                error, received = self._read_stream()
                if self._is_done():
                    break
                now = time.monotonic()
                if received or now - began > _HELD or not attempts:
                    attempts, broken_since = 0, now
                if error.code in _FINAL or now - broken_since > self._reconnect_timeout:
                    logger.error("session %s is lost: %s", self.name, error)
                    self.failure = str(error)
                    break
                logger.warning("the stream of session %s broke, attaching it again: %s", self.name, error)
                self._wake.wait(_BACKOFF[min(attempts, len(_BACKOFF) - 1)])
                attempts += 1
        finally:
            self._inbox.fail(self._inbox.live_ids(), self.failure or "the reading thread ended")
            self._inbox.set_open(is_open=False)

    def _read_stream(self) -> tuple[_errors.ChairliftError, bool]:
        """Attach and read until the stream ends. Returns what it ended with, and whether anything came."""
        received = False
        with self._lock:
            if self._is_done():
                return _errors.CallCancelledError("ended", code=grpc.StatusCode.CANCELLED), False
            call = self._call = self._result(generation_service_pb2.ResultRequest(session=self.name))
            self._unconfirmed = self._inbox.live_ids()
        watch = threading.Timer(_REPLAY_TIMEOUT, self._fail_unconfirmed)
        watch.daemon = True
        watch.start()
        try:
            for message in call:
                received = True
                self._unconfirmed.discard(message.request_id)
                self._inbox.receive(message)
                if self._is_done():
                    self._end_if_done()
        except grpc.RpcError as error:
            return _errors.from_rpc_error(error), received
        finally:
            watch.cancel()
        return _errors.ChairliftError("the stream ended", code=grpc.StatusCode.OK), received

    def _fail_unconfirmed(self) -> None:
        """Timer: requests that an attached stream does not mention are gone, with the service that knew them."""
        with self._lock:
            gone, self._unconfirmed = self._unconfirmed, set()
        self._inbox.fail(gone, "UNAVAILABLE: the service no longer knows this request")
        self._end_if_done()
