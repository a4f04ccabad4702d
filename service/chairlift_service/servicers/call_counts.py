"""How many calls there are and were, by method and status."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Final

from chairlift_service.requests.histogram import Histogram

_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)


class CallCounts:
    """Counts and durations of gRPC calls, from the reading of the request to the status."""

    def __init__(self) -> None:
        self.in_flight: Counter[str] = Counter()  # by method
        self.ended: Counter[tuple[str, str]] = Counter()  # by method and name of the status code
        self.seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(bounds_s=_BOUNDS_S))  # by method

    def begin(self, method: str) -> int:
        """A call begins; returns what `end` wants to know of it."""
        self.in_flight[method] += 1
        return time.monotonic_ns()

    def end(self, method: str, code: str, *, began_ns: int) -> None:
        """It has ended."""
        self.in_flight[method] -= 1
        self.ended[method, code] += 1
        self.seconds[method].observe(time.monotonic_ns() - began_ns)
