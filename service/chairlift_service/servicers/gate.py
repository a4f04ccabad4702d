"""What a call passes before and after its handler: may the caller make it, and can its messages be read and sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
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

    def __init__(self, *, authorizer: Authorizer | None, max_message_bytes: int) -> None:
        self._authorizer = authorizer
        self._max_message_bytes = max_message_bytes
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
            self._handlers[details.method] = handler = self._checked(handler)
        return handler

    def _checked(self, handler: Any) -> Any:
        """The handler, with answers for bytes that are no message, and for a single answer that is too large to send.

        For the first it is INTERNAL, as from gRPC's servers in C++, Go and Python's threads. grpc.aio says UNKNOWN, and
        of the second nothing but a code.
        """
        if handler.request_streaming:
            return _checked_stream(handler)
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def call(request: Any, context: CallContext) -> Any:
            await _check_readable(request, context)
            response = await method(request, context)
            if not handler.response_streaming and response.ByteSize() > self._max_message_bytes:
                await errors.abort(context, self._too_large(response.ByteSize()))
            return response

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(call, _reader(handler.request_deserializer), handler.response_serializer)

    def _too_large(self, num_bytes: int) -> ServiceError:
        return ServiceError(
            Reason.MESSAGE_TOO_LARGE,
            f"the answer has {num_bytes} bytes; a message has at most {self._max_message_bytes}",
            metadata={"max_message_bytes": str(self._max_message_bytes)},
        )


def _checked_stream(handler: Any) -> Any:
    """The same for a handler that reads a stream and answers with one, which is reflection."""

    async def call(requests: AsyncIterator[Any], context: CallContext) -> AsyncIterator[Any]:
        async def readable() -> AsyncIterator[Any]:
            async for request in requests:
                await _check_readable(request, context)
                yield request

        async for response in handler.stream_stream(readable(), context):
            yield response

    return grpc.stream_stream_rpc_method_handler(
        call, _reader(handler.request_deserializer), handler.response_serializer
    )


async def _check_readable(request: object, context: CallContext) -> None:
    """Ends the call where a message could not be read."""
    if request is _UNREADABLE:
        text = "the bytes are no message of this call"
        await errors.abort(context, ServiceError(Reason.UNREADABLE_REQUEST, text))


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNREADABLE

    return read


def _refusing(error: ServiceError) -> Any:
    """A handler that refuses. It is of the kind that need not read what the caller sends, whatever kind the call is."""

    async def refuse(_requests: object, context: CallContext) -> None:
        await errors.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
