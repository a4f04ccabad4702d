"""Bearer tokens: who may call what."""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from chairlift.v1 import admin_service_pb2, generation_service_pb2, info_service_pb2, text_service_pb2

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.gateway import SERVICE_NAME as GATEWAY_SERVICE
from chairlift_service.health import SERVICE_NAME as HEALTH_SERVICE
from chairlift_service.watched import FileError, Watched

_log = structlog.get_logger(__name__)

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, 2.1: b64token
_HEADER: Final = "authorization"
_SCHEME: Final = "bearer"
_DIGEST: Final = hashlib.sha256


class Role(enum.StrEnum):
    """What a token is good for."""

    CALLER = "caller"
    OBSERVER = "observer"
    ADMIN = "admin"


_GENERATION, _TEXT, _INFO, _ADMIN = (
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (generation_service_pb2, "GenerationService"),
        (text_service_pb2, "TextService"),
        (info_service_pb2, "InfoService"),
        (admin_service_pb2, "AdminService"),
    )
)
SERVICES: Final[Mapping[Role, frozenset[str]]] = {
    Role.CALLER: frozenset({_GENERATION, _TEXT, _INFO, GATEWAY_SERVICE}),
    Role.OBSERVER: frozenset({_INFO}),
    Role.ADMIN: frozenset({_ADMIN, _INFO}),
}
_GUARDED: Final = frozenset().union(*SERVICES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One line of the file. Of the token itself only the SHA-256 is kept, so that nothing can tell it."""

    digest: bytes
    name: str  # for the log
    services: frozenset[str]


class Authorizer:
    """Lets a call pass, or refuses it, by the token that it brings. The file is looked at on every call.

    - Health is free: those who probe have no token, and hear no more than whether the service serves.
    - Other services of grpc (reflection) need a token, of whatever role.
    """

    def __init__(self, path: str) -> None:
        """Reads the file. Raises FileError."""
        self._tokens = Watched([path], read=lambda: _read(path))
        if not self._tokens.current():
            raise FileError(f"auth_token_file = {path}: there is no token in it")

    def check(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """`method` is the call's path, `/package.Service/Method`. Raises ServiceError if it may not go on."""
        service = method.removeprefix("/").partition("/")[0]
        if service == HEALTH_SERVICE:
            return
        values = [str(value) for key, value in metadata if key == _HEADER]
        if not values:
            raise ServiceError(Reason.UNAUTHENTICATED, "the call needs a token: `authorization: Bearer TOKEN`")
        token = self._find(values[0]) if len(values) == 1 else None
        if token is None:
            raise ServiceError(Reason.UNAUTHENTICATED, "the token is not one of the service's")
        if service in _GUARDED and service not in token.services:
            _log.info("call not allowed", method=method, token=token.name)
            raise ServiceError(Reason.PERMISSION_DENIED, f"the token is not good for {service}")

    def _find(self, value: str) -> Token | None:
        """The token of a header. How long that takes tells nothing: all are compared, by digests of one length."""
        scheme, _, secret = value.partition(" ")
        digest = _DIGEST(secret.strip().encode()).digest()
        found = None
        for token in self._tokens.current():
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found if scheme.lower() == _SCHEME else None


def parse_tokens(text: str) -> tuple[Token, ...]:
    """The tokens of a file: `TOKEN [NAME [ROLE,...]]` a line, `#` begins a comment, the role is `caller` unless given.

    Raises ValueError that names the line, and never what stands in it where that may be a token.
    """
    tokens: dict[bytes, Token] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        secret, name, roles, *more = (*words, *(f"line {number}", Role.CALLER.value)[len(words) - 1 :])
        if more:
            raise ValueError(f"line {number} has more than TOKEN NAME ROLES")
        if not _TOKEN.fullmatch(secret):
            raise ValueError(f"line {number}: a token has letters, digits and -._~+/ alone, and may end with =")
        digest = _DIGEST(secret.encode()).digest()
        if digest in tokens:
            raise ValueError(f"line {number}: the token stands there twice")
        tokens[digest] = Token(digest=digest, name=name, services=_services(roles, number=number))
    return tuple(tokens.values())


def _services(roles: str, *, number: int) -> frozenset[str]:
    names = roles.split(",")
    if not set(names) <= set(Role):
        raise ValueError(f"line {number}: roles are {', '.join(Role)}, with commas between them")
    return frozenset().union(*(SERVICES[Role(name)] for name in names))


def _read(path: str) -> tuple[Token, ...]:
    try:
        return parse_tokens(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"auth_token_file = {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FileError(f"auth_token_file = {path}: is no UTF-8") from None
    except ValueError as error:
        raise FileError(f"auth_token_file = {path}: {error}") from None
