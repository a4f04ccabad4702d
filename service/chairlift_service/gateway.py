"""Whether gateways can route to the service. What that needs is optional: the extra `gateway`."""

from __future__ import annotations

import importlib.util
from typing import Any, Final, Literal, Protocol

import grpc

SERVICE_NAME: Final = "vllm.grpc.engine.VllmEngine"
"""The protocol of the gateway `smg`, which it speaks to vLLM; its messages are the package `smg-grpc-proto`."""

METHOD_NAMES: Final = (
    "Generate",
    "Embed",
    "HealthCheck",
    "FlushCache",
    "StartProfile",
    "StopProfile",
    "Abort",
    "GetModelInfo",
    "GetServerInfo",
    "GetLoads",
    "GetTokenizer",
    "SubscribeKvEvents",
)

_PACKAGE: Final = "smg_grpc_proto"

GatewayChoice = Literal["auto", "on", "off"]


class GatewayServicer(Protocol):
    """What answers gateways."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Puts it on a server."""
        ...


def answers_gateways(choice: GatewayChoice) -> bool:
    """Whether the service answers gateways: `auto` is on where the package is installed."""
    return choice == "on" or (choice == "auto" and is_installed())


def is_installed() -> bool:
    """Whether the protocol's messages are there."""
    return importlib.util.find_spec(_PACKAGE) is not None


def make_servicer(**parts: Any) -> GatewayServicer:
    """The servicer, which needs the package: it is imported here and nowhere else."""
    module = importlib.import_module("chairlift_service.servicers.vllm_engine.servicer")
    servicer: GatewayServicer = module.VllmEngineServicer(**parts)
    return servicer
