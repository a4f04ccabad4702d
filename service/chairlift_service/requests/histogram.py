"""A histogram of durations that is cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

NS_PER_S: Final = 1_000_000_000


class Histogram:
    """Counts durations by their upper bounds.

    (prometheus_client's own takes a lock, and some microseconds each time.)
    """

    __slots__ = ("_bounds_ns", "_counts", "_sum_ns")

    def __init__(self, *, bounds_s: Sequence[float]) -> None:
        """`bounds_s` rise; one more bucket takes what is longer than the last of them."""
        self._bounds_ns = [round(bound * NS_PER_S) for bound in bounds_s]
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_ns = 0

    def observe(self, duration_ns: int) -> None:
        """One more duration, in nanoseconds."""
        self._counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self._sum_ns += duration_ns

    @property
    def sum_s(self) -> float:
        """All durations together, in seconds."""
        return self._sum_ns / NS_PER_S

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound in seconds, durations up to it), the last bound `+Inf`."""
        bounds = [*(f"{bound / NS_PER_S:g}" for bound in self._bounds_ns), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))
