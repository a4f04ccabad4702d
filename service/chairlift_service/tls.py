"""TLS of the TCP addresses: certificate, key and, for mutual TLS, the authority that signs callers' certificates."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import grpc

from chairlift_service.watched import FileError, Watched

SETTLE_S: Final = 0.1
"""For handshakes to begin that were given the certificates before; they need some 0.1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files."""

    cert: str  # the chain, the server's own certificate first
    key: str
    client_ca: str | None  # set: callers need a certificate that it vouches for


class ServerTls:
    """The credentials of every encrypted address. The files are looked at for each new connection.

    Connections that are there stay as they are: TLS looks at certificates when it greets, and never again.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files. Raises FileError."""
        paths = [path for path in (files.cert, files.key, files.client_ca) if path is not None]
        self._watched = Watched(paths, read=lambda: _read(files))
        self._contexts = Watched(paths, read=lambda: _context(files))
        self._made: list[grpc.ServerCredentials] = []  # gRPC's core has their addresses only
        self.mutual = files.client_ca is not None
        """Whether callers need a certificate."""

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port` of one address."""
        news = _News(self._watched)
        self._made.append(
            grpc.dynamic_ssl_server_credentials(news.known, news.fetch, require_client_authentication=self.mutual)
        )
        return self._made[-1]

    def http_context(self) -> ssl.SSLContext:
        """For an address that Python's own TLS serves."""
        context = self._contexts.current()
        context.sni_callback = self._renew  # called at each greeting, also where the caller names no server
        return context

    def _renew(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._contexts.current()


class _News:
    """Tells one listening address of other certificates, once.

    gRPC asks before each handshake, under a lock, and frees what it had when it is given something new; handshakes that
    have just asked may be about to use that, without the lock (grpc/grpc#36693; with grpc 1.85 a crash every few
    thousand connections, where each is given something new). So nothing is given where nothing is new, and what is new
    is given only after a pause in which those before get through: meanwhile the lock keeps others from beginning.
    """

    def __init__(self, watched: Watched[grpc.ServerCertificateConfiguration]) -> None:
        self._watched = watched
        self.known = watched.current()
        """What the address has."""

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """What it is to have from now on; None: what it has. Called by gRPC's threads."""
        now = self._watched.current()
        if now is self.known:
            return None
        self.known = now
        time.sleep(SETTLE_S)
        return now


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Reads and checks them: gRPC itself would only refuse every connection, without a word. Raises FileError."""
    cert, key = _bytes("tls_cert", files.cert), _bytes("tls_key", files.key)
    client_ca = None if files.client_ca is None else _bytes("tls_client_ca", files.client_ca)
    _context(files)
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)


def _context(files: TlsFiles) -> ssl.SSLContext:
    """What they say, for Python's own TLS. Raises FileError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise FileError(f"tls_cert = {files.cert}, tls_key = {files.key}: {_why(error)}") from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise FileError(f"tls_client_ca = {files.client_ca}: {_why(error)}") from None
    return context


def _bytes(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{setting} = {path}: cannot be read: {error.strerror}") from None


def _refuse_password() -> NoReturn:
    """Asked for where the key is encrypted. Without it, OpenSSL would ask on the terminal."""
    raise ValueError("the key is encrypted, and nobody is there to type its password")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "").replace("_", " ").lower() or "not readable as PEM"
    return str(error)
