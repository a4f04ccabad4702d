"""The standard health service, grpc.health.v1: Check, List, and a Watch that stays open.

grpcio-health-checking brings the messages and a servicer for asyncio; that servicer has no List, and it writes to
watchers while it holds the lock that a change needs, so that one watcher who does not read keeps the others from
hearing of it. Hence this one, on the same messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

ServingStatus = health_pb2.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no type information
    """One state for the whole server and for each of its services, since all need the worker.

    Names it does not know are NOT_FOUND for Check and SERVICE_UNKNOWN, with the stream kept open, for Watch, as the
    protocol's definition says.
    """

    def __init__(self, *, services: Iterable[str]) -> None:
        self._names = frozenset({"", *services})
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether it says SERVING."""
        return self._serving

    def set_serving(self, *, serving: bool) -> None:
        """Sets the state of every service and tells all watchers."""
        if serving is not self._serving:
            self._serving = serving
            self._wake()

    def close(self) -> None:
        """Ends every Watch with UNAVAILABLE: the server ends."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802 - gRPC's name
        """The state now."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802, ARG002 - gRPC's signature
        """The state of every service now."""
        response = health_pb2.HealthListResponse()
        for name in self._names:
            response.statuses[name].status = self._status(name)
        return response

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802 - gRPC's name
        """The state now and at every change, until the caller ends the call. A slow reader may miss what passed."""
        told = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            elif self._closed:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the service ends")
            else:
                await changed.wait()

    def _status(self, service: str) -> Any:
        if service not in self._names:
            return ServingStatus.SERVICE_UNKNOWN
        return ServingStatus.SERVING if self._serving else ServingStatus.NOT_SERVING
