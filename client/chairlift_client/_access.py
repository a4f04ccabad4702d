"""How to get in: TLS, and the token that a call brings along."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypedDict

import grpc

from chairlift_client import _channel

TOKEN_VARIABLE: Final = "CHAIRLIFT_TOKEN"  # noqa: S105 # a variable's name, no token
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, 2.1

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How to encrypt, and whom to trust. Paths of PEM files.

    `ca`: the authorities that may vouch for the service (unset: those that gRPC brings along). `cert` and `key`: what
    to show to a service that asks for a certificate, with its `--tls-client-ca`. `server_name`: the name that the
    service's certificate has, where that is not the target's.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate needs its key, and a key its certificate")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises ValueError that names the one that cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


class Access(TypedDict, total=False):
    """What every client takes besides the address."""

    tls: Tls | None
    """Encrypt (for services with `--tls-cert`)."""
    token: str | None
    """Bring this token along (for services with `--auth-token-file`); without it that of $CHAIRLIFT_TOKEN, if set."""
    token_in_clear: bool
    """Send the token also where others could read it: unencrypted, and to another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """All that it takes to open a channel."""

    target: str
    metadata: Metadata = field(repr=False)  # of every call
    _credentials: grpc.ChannelCredentials | None
    _options: list[tuple[str, Any]]

    @classmethod
    def resolve(cls, target: str | None, access: Access) -> Connection:
        """Fills in what was not said. Raises ValueError where it cannot be done, or would tell others the token."""
        where = _channel.resolve_target(target)
        tls = access.get("tls")
        options = _channel.channel_options(where)
        if tls is not None and where.startswith("unix:"):
            raise ValueError(f"{where} is a Unix socket, which is not encrypted: leave TLS out")
        if tls is not None and tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        token = access.get("token") or os.environ.get(TOKEN_VARIABLE)
        if token and tls is None and not _channel.is_local(where) and not access.get("token_in_clear"):
            raise ValueError(f"the token would go to {where} for everybody to read: use TLS, or say token_in_clear")
        return cls(
            target=where,
            metadata=_bearer(token) if token else (),
            _credentials=None if tls is None else tls.credentials(),
            _options=options,
        )

    def open(self) -> Any:
        """A blocking channel."""
        if self._credentials is None:
            return grpc.insecure_channel(self.target, options=self._options)
        return grpc.secure_channel(self.target, self._credentials, options=self._options)

    def open_async(self) -> Any:
        """A channel of grpc.aio; inside a running event loop."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.target, options=self._options)
        return grpc.aio.secure_channel(self.target, self._credentials, options=self._options)


def _bearer(token: str) -> Metadata:
    if not _TOKEN.fullmatch(token):
        raise ValueError("a token has letters, digits and -._~+/ alone, and may end with =")
    return (("authorization", f"Bearer {token}"),)


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None
