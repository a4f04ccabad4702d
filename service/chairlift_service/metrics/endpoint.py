"""The HTTP address that Prometheus scrapes: GET /metrics, and nothing else."""

from __future__ import annotations

import asyncio
import http.client
import io
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import grpc
import structlog
from chairlift.v1 import info_service_pb2
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from chairlift_service.addresses import UnixAddress, parse_address
from chairlift_service.auth import Authorizer
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.tls import ServerTls

PATH: Final = "/metrics"

MAX_HEAD_BYTES: Final = 16 * 1024
"""Of a request's first line and headers."""

PATIENCE_S: Final = 10.0
"""For a caller to send its request, and again for it to take the answer."""

_INFO: Final = info_service_pb2.DESCRIPTOR.services_by_name["InfoService"].full_name
_GET_SERVER: Final = f"/{_INFO}/GetServer"  # tells the same; who may call it may scrape

_log = structlog.get_logger(__name__)


class MetricsEndpoint:
    """A server of one page, one request a connection. Binds as a gRPC server does, so `Listeners` has its rules."""

    def __init__(self, *, registry: CollectorRegistry, authorizer: Authorizer | None, tls: ServerTls | None) -> None:
        self._registry = registry
        self._authorizer = authorizer
        self._tls = tls
        self._sockets: list[tuple[socket.socket, bool]] = []  # and whether what comes there is encrypted
        self._servers: list[asyncio.Server] = []
        self._calls: set[asyncio.Task[None]] = set()

    def add_insecure_port(self, address: str) -> int:
        """Binds; returns the port, 0 for a Unix socket. Raises OSError."""
        return self._bind(address, encrypted=False)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:  # noqa: ARG002 - made for gRPC; those for HTTP are `tls`'s
        """Binds, for encrypted connections; returns the port. Raises OSError."""
        return self._bind(address, encrypted=True)

    async def start(self) -> None:
        """Answers from now on."""
        for bound, encrypted in self._sockets:
            context = self._tls.http_context() if encrypted and self._tls is not None else None
            server = await asyncio.start_server(self._serve, sock=bound, ssl=context, limit=MAX_HEAD_BYTES)
            self._servers.append(server)

    async def stop(self) -> None:
        """Ends all connections and gives the addresses back."""
        for server in self._servers:
            server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for bound, _ in self._sockets:
            bound.close()

    def _bind(self, text: str, *, encrypted: bool) -> int:
        address = parse_address(text)
        if isinstance(address, UnixAddress):
            bound = socket.socket(socket.AF_UNIX)
            where: object = address.path
        else:
            family, _, _, _, where = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = socket.socket(family)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sockets.append((bound, encrypted))
        bound.bind(where)  # type: ignore[arg-type] # an address of this family
        bound.listen()
        return 0 if isinstance(address, UnixAddress) else int(bound.getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await self._answer(reader)
            async with asyncio.timeout(PATIENCE_S):
                writer.write(answer)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            _log.debug("a scrape was broken off")
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = io.BytesIO(await reader.readuntil(b"\r\n\r\n"))
            method, target, version = head.readline().decode("latin-1").split()
            headers = http.client.parse_headers(head)
        except (asyncio.LimitOverrunError, http.client.HTTPException, ValueError):
            return _response(HTTPStatus.BAD_REQUEST)
        if not version.startswith("HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        if target.partition("?")[0] != PATH:
            return _response(HTTPStatus.NOT_FOUND)
        if method not in {"GET", "HEAD"}:
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET, HEAD"})
        if (refusal := self._refusal(headers)) is not None:
            return refusal
        encode, content_type = _encoder(headers.get("Accept", ""))
        page = encode(self._registry)
        return _response(HTTPStatus.OK, page, headers={"Content-Type": content_type}, with_body=method == "GET")

    def _refusal(self, headers: http.client.HTTPMessage) -> bytes | None:
        if self._authorizer is None:
            return None
        try:
            self._authorizer.check(_GET_SERVER, [(name.lower(), value) for name, value in headers.items()])
        except ServiceError as error:
            if error.reason is Reason.PERMISSION_DENIED:
                return _response(HTTPStatus.FORBIDDEN)
            return _response(HTTPStatus.UNAUTHORIZED, headers={"WWW-Authenticate": "Bearer"})
        return None


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """The form that a scraper takes, and the name of it."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return choose_encoder("")


def _response(
    status: HTTPStatus, body: bytes | None = None, *, headers: Mapping[str, str] | None = None, with_body: bool = True
) -> bytes:
    """A whole HTTP response; the body is the status in words where there is none."""
    content = f"{status.phrase}\n".encode() if body is None else body
    fields = {"Content-Length": str(len(content)), "Connection": "close", **(headers or {})}
    fields.setdefault("Content-Type", "text/plain; charset=utf-8")
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in fields.items())]
    head = "\r\n".join((*lines, "", "")).encode("latin-1")
    return head + content if with_body else head
