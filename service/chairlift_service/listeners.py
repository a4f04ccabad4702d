"""Binding of addresses, with errors in one line and Unix sockets that only their owner can use."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Final, Protocol

import grpc

from chairlift_service.addresses import Address, TcpAddress, UnixAddress
from chairlift_service.tls import ServerTls

_SOCKET_UMASK: Final = 0o177  # leaves mode 0600


class ListenError(Exception):
    """An address cannot be listened on. The text is one line that names it and, from `Listeners.bind`, its setting."""


class PortServer(Protocol):
    """The part of grpc.aio.Server that binds."""

    def add_insecure_port(self, address: str) -> int:
        """Binds; returns the port."""
        ...

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Binds with TLS; returns the port."""
        ...


class SocketFile:
    """A Unix socket's file that this process made; `remove` takes it away unless another has replaced it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._inode = self._path.stat().st_ino

    def remove(self) -> None:
        """Removes the file. A second call does nothing."""
        try:
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        except FileNotFoundError:
            pass


class Listeners:
    """All addresses of all servers, to be taken away together.

    With `tls`, all TCP addresses are encrypted. Unix sockets never are: what goes through them stays in the machine,
    and the file's mode says who may.
    """

    def __init__(self, *, tls: ServerTls | None) -> None:
        self._tls = tls
        self._files: list[SocketFile] = []

    def bind(self, server: PortServer, address: Address, *, setting: str) -> Address:
        """Binds, and returns the address with its real port. `setting` is who asked for it. Raises ListenError."""
        try:
            if isinstance(address, UnixAddress):
                return self._bind_unix(server, address)
            return self._bind_tcp(server, address)
        except ListenError as error:
            raise ListenError(f"{setting} = {error}") from error

    def remove_files(self) -> None:
        """Removes the files of Unix sockets."""
        while self._files:
            self._files.pop().remove()

    def _bind_tcp(self, server: PortServer, address: TcpAddress) -> Address:
        _try_bind(address)  # gRPC's own error says little
        try:
            if self._tls is None:
                port = server.add_insecure_port(str(address))
            else:
                port = server.add_secure_port(str(address), self._tls.credentials())
        except RuntimeError as error:
            raise ListenError(f"{address}: cannot be bound") from error
        return TcpAddress(address.host, port)

    def _bind_unix(self, server: PortServer, address: UnixAddress) -> Address:
        _clear_way(address)
        before = os.umask(_SOCKET_UMASK)  # from its first moment on the file must be nobody else's
        try:
            server.add_insecure_port(str(address))
            self._files.append(SocketFile(address.path))
        except (RuntimeError, OSError) as error:
            raise ListenError(f"{address}: cannot be bound: {_reason(error, address)}") from error
        finally:
            os.umask(before)
        return address


def _try_bind(address: TcpAddress) -> None:
    """Raises ListenError if the address cannot be bound now."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        errors = [error for info in found if (error := _bind_error(info[0], info[4])) is not None]
    except OSError as error:
        raise ListenError(f"{address}: {error.strerror or error}") from error
    in_use = [error for error in errors if error.errno == errno.EADDRINUSE]
    if in_use or len(errors) == len(found):
        raise ListenError(f"{address}: {(in_use or errors)[0].strerror}")


def _bind_error(family: int, where: object) -> OSError | None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)  # type: ignore[arg-type] # an address of this family, from getaddrinfo
        except OSError as error:
            return error
    return None


def _clear_way(address: UnixAddress) -> None:
    """Removes a socket's file on which nobody listens any more. Raises ListenError if somebody does, or it is none."""
    try:
        mode = Path(address.path).lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"{address}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{address}: the file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            Path(address.path).unlink(missing_ok=True)
            return
        except OSError as error:
            raise ListenError(f"{address}: the socket exists: {error}") from error
    raise ListenError(f"{address}: another process listens there")


def _reason(error: Exception, address: UnixAddress) -> str:
    if not Path(address.path).parent.is_dir():
        return f"{Path(address.path).parent} is no folder"
    return " ".join(str(error).split()) or type(error).__name__
