"""TLS of the TCP addresses: certificate, key and, for mutual TLS, the authority that signs callers' certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from chairlift_service.watched import FileError, Watched


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
        self.mutual = files.client_ca is not None
        """Whether callers need a certificate."""
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._watched.current(), self._watched.current, require_client_authentication=self.mutual
        )
        """For `add_secure_port`, whatever the address."""


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Reads and checks them: gRPC itself would only refuse every connection, without a word. Raises FileError."""
    cert, key = _bytes("tls_cert", files.cert), _bytes("tls_key", files.key)
    client_ca = None if files.client_ca is None else _bytes("tls_client_ca", files.client_ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise FileError(f"tls_cert = {files.cert}, tls_key = {files.key}: {_why(error)}") from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as error:
            raise FileError(f"tls_client_ca = {files.client_ca}: {_why(error)}") from None
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)


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
