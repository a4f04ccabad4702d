"""The gRPC servers: which services stand on which address."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chairlift_service.gateway import METHOD_NAMES as GATEWAY_METHODS
from chairlift_service.gateway import SERVICE_NAME as GATEWAY_SERVICE
from chairlift_service.gateway import GatewayChoice, GatewayServicer, answers_gateways
from chairlift_service.grpc_options import ConnectionLimits, server_options
from chairlift_service.health import SERVICE_NAME as HEALTH_SERVICE
from chairlift_service.health import Health
from chairlift_service.servicers.admin import AdminServicer
from chairlift_service.servicers.generation import GenerationServicer
from chairlift_service.servicers.info import InfoServicer
from chairlift_service.servicers.reflection import SERVICE_NAMES as REFLECTION_SERVICES
from chairlift_service.servicers.reflection import add_reflection
from chairlift_service.servicers.text import TextServicer

_MAIN = (
    generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    text_service_pb2.DESCRIPTOR.services_by_name["TextService"],
    info_service_pb2.DESCRIPTOR.services_by_name["InfoService"],
)
_ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]

MAIN_SERVICES = tuple(service.full_name for service in _MAIN)
ADMIN_SERVICES = (_ADMIN.full_name,)
METHODS = (
    *(f"/{service.full_name}/{method.name}" for service in (*_MAIN, _ADMIN, _HEALTH) for method in service.methods),
    *(f"/{name}/ServerReflectionInfo" for name in REFLECTION_SERVICES),
    *(f"/{GATEWAY_SERVICE}/{name}" for name in GATEWAY_METHODS),
)
"""Every method of every server."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MainServicers:
    """What stands on every `listen` address."""

    generation: GenerationServicer
    text: TextServicer
    info: InfoServicer
    gateway: GatewayServicer | None  # None: gateways are not answered
    health: Health


def main_services(gateway: GatewayChoice) -> tuple[str, ...]:
    """Names of the services on the `listen` addresses, health and reflection aside."""
    return (*MAIN_SERVICES, GATEWAY_SERVICE) if answers_gateways(gateway) else MAIN_SERVICES


def main_server(
    servicers: MainServicers, *, interceptors: Sequence[grpc.aio.ServerInterceptor], limits: ConnectionLimits
) -> grpc.aio.Server:
    """The server for callers. Not bound, not started."""
    server = grpc.aio.server(interceptors=interceptors, options=server_options(limits))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(servicers.generation, server)  # type: ignore[no-untyped-call] # generated
    text_service_pb2_grpc.add_TextServiceServicer_to_server(servicers.text, server)  # type: ignore[no-untyped-call] # generated
    info_service_pb2_grpc.add_InfoServiceServicer_to_server(servicers.info, server)  # type: ignore[no-untyped-call] # generated
    if servicers.gateway is not None:
        servicers.gateway.add_to(server)
    _add_standard(server, servicers.health, services=main_services("off" if servicers.gateway is None else "on"))
    return server


def admin_server(
    admin: AdminServicer,
    health: Health,
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    limits: ConnectionLimits,
) -> grpc.aio.Server:
    """The server for operators. Not bound, not started."""
    server = grpc.aio.server(interceptors=interceptors, options=server_options(limits))
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)  # type: ignore[no-untyped-call] # generated
    _add_standard(server, health, services=ADMIN_SERVICES)
    return server


def _add_standard(server: grpc.aio.Server, servicer: Health, *, services: tuple[str, ...]) -> None:
    """Health and reflection."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    add_reflection(server, services=(*services, HEALTH_SERVICE))
