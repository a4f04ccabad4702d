"""The gRPC servers: which services stand on which address."""

from __future__ import annotations

import dataclasses

import grpc
from chairlift.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    info_service_pb2,
    info_service_pb2_grpc,
    text_service_pb2,
    text_service_pb2_grpc,
)
from grpc_health.v1 import health_pb2_grpc

from chairlift_service.grpc_options import ConnectionLimits, server_options
from chairlift_service.health import SERVICE_NAME as HEALTH_SERVICE
from chairlift_service.health import Health
from chairlift_service.servicers.admin import AdminServicer
from chairlift_service.servicers.gate import Gate
from chairlift_service.servicers.generation import GenerationServicer
from chairlift_service.servicers.info import InfoServicer
from chairlift_service.servicers.reflection import add_reflection
from chairlift_service.servicers.text import TextServicer

MAIN_SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (generation_service_pb2, "GenerationService"),
        (text_service_pb2, "TextService"),
        (info_service_pb2, "InfoService"),
    )
)
ADMIN_SERVICES = (admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MainServicers:
    """What stands on every `listen` address."""

    generation: GenerationServicer
    text: TextServicer
    info: InfoServicer
    health: Health


def main_server(servicers: MainServicers, *, gate: Gate, limits: ConnectionLimits) -> grpc.aio.Server:
    """The server for callers. Not bound, not started."""
    server = grpc.aio.server(interceptors=(gate,), options=server_options(limits))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(servicers.generation, server)  # type: ignore[no-untyped-call] # generated
    text_service_pb2_grpc.add_TextServiceServicer_to_server(servicers.text, server)  # type: ignore[no-untyped-call] # generated
    info_service_pb2_grpc.add_InfoServiceServicer_to_server(servicers.info, server)  # type: ignore[no-untyped-call] # generated
    _add_standard(server, servicers.health, services=MAIN_SERVICES)
    return server


def admin_server(admin: AdminServicer, health: Health, *, gate: Gate, limits: ConnectionLimits) -> grpc.aio.Server:
    """The server for operators. Not bound, not started."""
    server = grpc.aio.server(interceptors=(gate,), options=server_options(limits))
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)  # type: ignore[no-untyped-call] # generated
    _add_standard(server, health, services=ADMIN_SERVICES)
    return server


def _add_standard(server: grpc.aio.Server, servicer: Health, *, services: tuple[str, ...]) -> None:
    """Health and reflection."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    add_reflection(server, services=(*services, HEALTH_SERVICE))
