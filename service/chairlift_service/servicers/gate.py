"""What every call passes before its handler: whether the caller may make it, and whether its bytes can be read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from chairlift_service import errors
from chairlift_service.auth import Authorizer
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.servicers.edge import CallContext

_UNREADABLE: Final = object()


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc has no types
    """An interceptor; without an authorizer everybody may call."""

    def __init__(self, *, authorizer: Authorizer | None) -> None:
        self._authorizer = authorizer
        self._handlers: dict[str, Any] = {}  # by method; only those that exist come in

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The handler of a call, or one that refuses it."""
        if self._authorizer is not None:
            try:
                self._authorizer.check(details.method, details.invocation_metadata)
            except ServiceError as error:
                return _refusing(error)
        handler = self._handlers.get(details.method)
        if handler is None and (handler := await continuation(details)) is not None:
            self._handlers[details.method] = handler = _reading(handler)
        return handler


def _refusing(error: ServiceError) -> Any:
    """A handler that refuses. It is of the kind that need not read what the caller sends, whatever kind the call is."""

    async def refuse(_requests: object, context: CallContext) -> None:
        await errors.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _reading(handler: Any) -> Any:
    """The handler, with an answer for bytes that are no message.

    It is INTERNAL, as from gRPC's servers in C++, Go and Python's threads. grpc.aio alone says UNKNOWN.
    """
    if handler.request_streaming:
        return handler
    deserialize = handler.request_deserializer
    method = handler.unary_stream if handler.response_streaming else handler.unary_unary

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNREADABLE

    async def call(request: Any, context: CallContext) -> Any:
        if request is _UNREADABLE:
            await errors.abort(
                context, ServiceError(Reason.UNREADABLE_REQUEST, "the bytes are no message of this call")
            )
        return await method(request, context)

    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(call, read, handler.response_serializer)
