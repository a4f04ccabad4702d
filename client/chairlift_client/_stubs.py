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

HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"


class Stubs:
    """Callables for every method of the API, on a blocking or an asyncio channel."""

    def __init__(self, channel: Any) -> None:
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
