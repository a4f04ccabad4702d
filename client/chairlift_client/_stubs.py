"""The one place where the generated stubs, which carry no types, are made."""

from __future__ import annotations

from typing import Any, Final

from chairlift.v1 import (
    admin_service_pb2_grpc,
    generation_service_pb2_grpc,
    info_service_pb2_grpc,
    text_service_pb2_grpc,
)
from google.protobuf import wrappers_pb2

from chairlift_client._access import Metadata

HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"


class Stubs:
    """Callables for every method of the API, on a blocking or an asyncio channel."""

    def __init__(self, channel: Any, *, metadata: Metadata = ()) -> None:
        """`metadata` goes along with every call."""
        channel = _Accompanied(channel, metadata) if metadata else channel
        self.generation: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call] # generated
        self.text: Any = text_service_pb2_grpc.TextServiceStub(channel)  # type: ignore[no-untyped-call] # generated
        self.info: Any = info_service_pb2_grpc.InfoServiceStub(channel)  # type: ignore[no-untyped-call] # generated
        self.admin: Any = admin_service_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call] # generated
        # The standard health messages have one field each, number 1: a string, and an enum. The well-known wrapper
        # types are the same on the wire, which spares the plain install the package grpcio-health-checking.
        self.health_check: Any = channel.unary_unary(
            HEALTH_CHECK,
            request_serializer=wrappers_pb2.StringValue.SerializeToString,
            response_deserializer=wrappers_pb2.Int32Value.FromString,
        )


class _Accompanied:
    """A channel, blocking or not, whose calls all bring the same metadata; as much of one as stubs need.

    (gRPC's interceptors would do, but those of grpc.aio put objects of their own in the place of its calls.)
    """

    def __init__(self, channel: Any, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> _Method:
        """As the channel's."""
        return _Method(self._channel.unary_unary(*args, **kwargs), self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> _Method:
        """As the channel's."""
        return _Method(self._channel.unary_stream(*args, **kwargs), self._metadata)


class _Method:
    """A method's callable that adds the metadata."""

    def __init__(self, method: Any, metadata: Metadata) -> None:
        self._method = method
        self._metadata = metadata

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._method(request, metadata=self._metadata, **options)

    def future(self, request: Any, **options: Any) -> Any:
        """The call of a blocking channel, not waited for."""
        return self._method.future(request, metadata=self._metadata, **options)
