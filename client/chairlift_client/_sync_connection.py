"""What the blocking clients share."""

from __future__ import annotations

from typing import Any, Self, Unpack

import grpc

from chairlift_client import _errors
from chairlift_client._access import Access, Connection
from chairlift_client._stubs import Stubs


class Connected:
    """A connection to one address, made with the first call. `tls`, `token` and `token_in_clear`: see `Access`."""

    def __init__(self, target: str | None = None, **access: Unpack[Access]) -> None:
        connection = Connection.resolve(target, access)
        self.target = connection.target
        self._channel = connection.open()
        self._stubs = Stubs(self._channel, metadata=connection.metadata)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight end, and their requests with them."""
        self._channel.close()


def call(method: Any, request: Any, *, timeout: float | None) -> Any:
    """Make a unary call. Raises ChairliftError."""
    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise _errors.from_rpc_error(error) from None
