"""The servers on their addresses: what is encrypted there, and who may come in."""

from __future__ import annotations

import asyncio

import grpc
import structlog
from prometheus_client import CollectorRegistry

from chairlift_service.addresses import Address
from chairlift_service.auth import Authorizer
from chairlift_service.config import ServiceSettings
from chairlift_service.core import Core
from chairlift_service.grpc_options import ConnectionLimits
from chairlift_service.listeners import Listeners, PortServer
from chairlift_service.metrics.endpoint import PATH, MetricsEndpoint
from chairlift_service.servers import METHODS, admin_server, main_server
from chairlift_service.servicers.call_meter import CallMeter
from chairlift_service.servicers.gate import Gate
from chairlift_service.tls import ServerTls, TlsFiles

_log = structlog.get_logger(__name__)


class Entrance:
    """Binds, starts and stops the servers. The log tells where others can come in unencrypted, or unasked."""

    def __init__(self, core: Core) -> None:
        """Reads the files of TLS and tokens. Raises FileError."""
        self._core = core
        settings = core.configuration.service
        self._tls = _tls(settings)
        self._authorizer = None if settings.auth_token_file is None else Authorizer(settings.auth_token_file)
        self._gate = Gate(authorizer=self._authorizer, max_message_bytes=settings.max_message_bytes)
        self._endpoint: MetricsEndpoint | None = None
        self._servers: list[grpc.aio.Server] = []
        self._listeners = Listeners(tls=self._tls)
        self.addresses: tuple[Address, ...] = ()
        """Those for callers, with their real ports, once they are open."""

    async def open(self) -> None:
        """Binds and starts. Raises ListenError."""
        configuration, core = self._core.configuration, self._core
        limits = _limits(configuration.service)
        interceptors = self._interceptors()
        main = main_server(core.main_servicers(), interceptors=interceptors, limits=limits)
        self._servers.append(main)
        self.addresses = tuple(self._bind(main, address, setting="listen") for address in configuration.listen)
        if configuration.admin_listen is not None:
            admin = admin_server(core.admin_servicer(), core.admin_health, interceptors=interceptors, limits=limits)
            self._servers.append(admin)
            where = self._bind(admin, configuration.admin_listen, setting="admin_listen")
            _log.info("admin service", address=str(where))
        self._endpoint = self._bind_metrics()
        for each in self._servers:
            await each.start()
        if self._endpoint is not None:
            await self._endpoint.start()

    async def stop(self, *, grace_s: float) -> None:
        """Ends all connections; open calls get `grace_s` seconds."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        if self._endpoint is not None:
            await self._endpoint.stop()

    def remove_files(self) -> None:
        """Removes the files of Unix sockets, and lets others take the addresses."""
        self._listeners.remove_files()

    def _interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        metered = self._core.metered
        return (self._gate,) if metered is None else (CallMeter(counts=metered.calls, methods=METHODS), self._gate)

    def _bind_metrics(self) -> MetricsEndpoint | None:
        core = self._core
        if core.metered is None or core.configuration.metrics_listen is None:
            return None
        registry = CollectorRegistry()
        registry.register(core.collector(core.metered))
        endpoint = MetricsEndpoint(registry=registry, authorizer=self._authorizer, tls=self._tls)
        where = self._bind(endpoint, core.configuration.metrics_listen, setting="metrics_listen")
        _log.info("metrics", address=str(where), path=PATH)
        return endpoint

    def _bind(self, server: PortServer, address: Address, *, setting: str) -> Address:
        bound = self._listeners.bind(server, address, setting=setting)
        if not bound.is_local:
            if self._tls is None:
                _log.warning("not encrypted: whoever is on the way can read and change everything", address=str(bound))
            if self._authorizer is None and not (self._tls is not None and self._tls.mutual):
                _log.warning("no tokens and no callers' certificates: whoever gets there may call", address=str(bound))
        return bound


def _tls(settings: ServiceSettings) -> ServerTls | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return ServerTls(TlsFiles(cert=settings.tls_cert, key=settings.tls_key, client_ca=settings.tls_client_ca))


def _limits(settings: ServiceSettings) -> ConnectionLimits:
    return ConnectionLimits(
        max_message_bytes=settings.max_message_bytes,
        max_age=settings.max_connection_age,
        max_age_grace=settings.max_connection_age_grace,
        max_idle=settings.max_connection_idle,
    )
