"""Addresses that the service listens on: `HOST:PORT` and `unix:PATH`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

MAX_UNIX_PATH_BYTES: Final = 107  # sockaddr_un.sun_path has 108, the last one for the ending zero (unix(7))
_UNIX: Final = "unix:"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host (a name, or an IP address without brackets) and a port; port 0 lets the system pick one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it. Of names, `localhost` alone is known to be local."""
        try:
            ip = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host.lower() == "localhost"
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        return (mapped or ip).is_loopback


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket's path."""

    path: str

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"

    @property
    def is_local(self) -> bool:
        """True: file permissions guard it."""
        return True


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """The address that `text` names; `str()` of it is what gRPC takes. Raises ValueError saying what is wrong."""
    if text.startswith(_UNIX):
        return _unix(text.removeprefix(_UNIX))
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError("expected HOST:PORT or unix:PATH")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{host!r} in brackets is no IPv6 address") from None
    elif ":" in host:
        raise ValueError("an IPv6 address stands in brackets, as in [::1]:50051")
    if not host or not host.isprintable() or any(c in host for c in " /[]"):
        raise ValueError("expected HOST:PORT or unix:PATH")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"port must be a number from 0 to 65535, is {port!r}")
    return TcpAddress(host, int(port))


def _unix(path: str) -> UnixAddress:
    if path.startswith("///"):
        path = path.removeprefix("//")  # unix:///absolute/path is gRPC's other spelling
    if not path or "\0" in path:
        raise ValueError("expected unix:PATH")
    if len(path.encode(errors="surrogateescape")) > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"the path of a Unix socket has at most {MAX_UNIX_PATH_BYTES} bytes")
    return UnixAddress(path)
