"""What is counted of the server, by worker and service together."""

from __future__ import annotations

import asyncio
import time

from chairlift.v1 import info_service_pb2

from chairlift_service import convert
from chairlift_service.requests.registry import Registry
from chairlift_service.workers.figures import WorkerFigures


class ServerStatistics:
    """One look at a time; `ended` is set when there is nothing to look at any more."""

    def __init__(self, *, figures: WorkerFigures, registry: Registry) -> None:
        self._figures = figures
        self._registry = registry
        self._began_ns = time.monotonic_ns()
        self.ended = asyncio.Event()

    @property
    def uptime_ns(self) -> int:
        """Nanoseconds since the service was started."""
        return time.monotonic_ns() - self._began_ns

    def read(self) -> info_service_pb2.Statistics:
        """Counters and gauges now."""
        return convert.statistics(
            self._figures.read(), worker_restarts=self._figures.num_lost, requests_held=len(self._registry)
        )
