"""Requests that wait for their first step, or for their next after giving up their pages."""

from __future__ import annotations

import heapq
from collections.abc import Set as AbstractSet
from typing import Final

from chairlift_worker.request import Request

_SLACK: Final = 64  # entries of removed requests that are not worth a clean-up


class WaitingQueue:
    """In order of rank: by arrival, with priority as a head start. Who gave up its pages comes back to its old place.

    Adding and removing cost O(log n); a removed entry stays in the heap until it comes to the front, or until
    such entries are the larger part. Who is in one of `aside`, sets that their owners change, waits outside of the
    order and is to be pushed again when it is in none of them any more.
    """

    def __init__(self, *aside: AbstractSet[int]) -> None:
        self._aside = aside
        self._heap: list[tuple[int, int]] = []  # ranks, which end with the uid
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, uid: int) -> bool:
        return uid in self._requests

    def push(self, request: Request) -> None:
        """Adds a request."""
        self._requests[request.uid] = request
        heapq.heappush(self._heap, request.rank)

    def push_again(self, uid: int) -> None:
        """Puts one that waited outside of the order back into it; one that is not here is let be."""
        request = self._requests.get(uid)
        if request is not None:
            heapq.heappush(self._heap, request.rank)

    def first(self) -> Request | None:
        """The next in order, which stays."""
        while self._heap and self._is_passed_by(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]] if self._heap else None

    def pop(self) -> Request:
        """Removes and returns the next in order."""
        request = self.first()
        if request is None:
            raise IndexError("the waiting queue is empty")
        heapq.heappop(self._heap)
        del self._requests[request.uid]
        return request

    def discard(self, uid: int) -> None:
        """Removes a request wherever it stands."""
        self._requests.pop(uid, None)
        if len(self._heap) > 2 * len(self._requests) + _SLACK:
            self._heap = sorted(request.rank for request in self._requests.values())

    def _is_passed_by(self, uid: int) -> bool:
        return uid not in self._requests or any(uid in uids for uids in self._aside)
