"""What is counted of the server, by worker and service together."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec
from chairlift.v1 import info_service_pb2
from chairlift_worker.ipc.status import StatusReader

from chairlift_service import convert
from chairlift_service.requests.registry import Registry

_NOT_STATISTICS: Final = frozenset({"phase", "heartbeat_ns", "step", "planned_tokens"})


class ServerStatistics:
    """One look at a time; `ended` is set when there is nothing to look at any more."""

    def __init__(self, *, status: StatusReader, registry: Registry) -> None:
        self._status = status
        self._registry = registry
        self._began_ns = time.monotonic_ns()
        self.ended = asyncio.Event()

    @property
    def uptime_ns(self) -> int:
        """Nanoseconds since the service was started."""
        return time.monotonic_ns() - self._began_ns

    def read(self) -> info_service_pb2.Statistics:
        """Counters and gauges now."""
        status = msgspec.structs.asdict(self._status.read())
        return convert.statistics(
            {name: value for name, value in status.items() if name not in _NOT_STATISTICS},
            requests_held=len(self._registry),
        )
