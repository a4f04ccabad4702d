"""Tells the service which finished results it need not keep."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any, Final

from chairlift.v1 import generation_service_pb2

logger = logging.getLogger("chairlift_client.manager")

_TIMEOUT: Final = 10.0  # seconds of one call
_BATCH: Final = 256  # ids of one call


class Releaser:
    """Cancels finished requests, which lets their results go: one call at a time, with all ids that came meanwhile.

    A call that fails is not repeated: the service lets results go by itself after a while.
    """

    def __init__(self, *, cancel: Any) -> None:
        self._cancel = cancel
        self._free = threading.Condition()
        self._waiting: dict[str, None] = {}
        self._in_flight: frozenset[str] = frozenset()

    def release(self, request_id: str) -> None:
        """Let a finished request's result go, soon. Never blocks."""
        with self._free:
            self._waiting[request_id] = None
            self._send()

    def wait_until_free(self, request_ids: Iterable[str]) -> None:
        """Wait until no call is out that would hit a new request of one of these ids."""
        ids = set(request_ids)
        with self._free:
            # Each call has a time limit, so this ends; twice its length is for one that has not begun yet.
            self._free.wait_for(lambda: ids.isdisjoint(self._waiting) and ids.isdisjoint(self._in_flight), 2 * _TIMEOUT)

    def _send(self) -> None:
        """Begin a call unless one is out. Call it with the lock held."""
        if self._in_flight or not self._waiting:
            return
        ids = list(self._waiting)[:_BATCH]
        for request_id in ids:
            del self._waiting[request_id]
        self._in_flight = frozenset(ids)
        try:
            call = self._cancel.future(generation_service_pb2.CancelRequest(request_ids=ids), timeout=_TIMEOUT)
        except ValueError:  # the channel was closed, and the session with it
            self._in_flight = frozenset()
            self._waiting.clear()
        else:
            call.add_done_callback(self._done)

    def _done(self, call: Any) -> None:
        with self._free:
            if call.code() is None or call.code().value[0]:
                logger.debug("could not let %d results go: %s", len(self._in_flight), call.code())
            self._in_flight = frozenset()
            self._send()
            self._free.notify_all()
