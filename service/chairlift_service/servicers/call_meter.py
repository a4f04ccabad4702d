"""Meters every call, refused ones included."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, Final

import grpc

from chairlift_service.servicers.call_counts import CallCounts
from chairlift_service.servicers.edge import CallContext

OTHER: Final = "other"
"""Stands for every method that the server does not have: callers choose those names."""

_CODES: Final[dict[int, str]] = {code.value[0]: code.name for code in grpc.StatusCode}

_MAKERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class CallMeter(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc has no types
    """An interceptor, to stand before all others."""

    def __init__(self, *, counts: CallCounts, methods: Collection[str]) -> None:
        """`methods` are the paths, `/package.Service/Method`, that are told apart."""
        self._counts = counts
        self._methods = frozenset(methods)
        self._metered: dict[str, tuple[Any, Any]] = {}  # by method: its usual handler, and the one that meters it

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The handler of a call, metered."""
        handler = await continuation(details)
        method = details.method if details.method in self._methods else OTHER
        if handler is None:
            self._counts.end(method, "UNIMPLEMENTED", began_ns=self._counts.begin(method))
            return None
        usual, metered = self._metered.get(method, (None, None))
        if usual is not handler:
            metered = self._meter(handler, method)
            self._metered[method] = (handler, metered)
        return metered

    def _meter(self, handler: Any, method: str) -> Any:
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        counts = self._counts

        async def call(request: Any, context: Any) -> Any:
            began_ns = counts.begin(method)
            code = "UNKNOWN"
            try:
                response = await inner(request, context)
                code = _code(context)
            except BaseException as error:
                code = _code_of_failure(error, context)
                raise
            else:
                return response
            finally:
                counts.end(method, code, began_ns=began_ns)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            began_ns = counts.begin(method)
            code = "CANCELLED"  # where the generator is closed
            try:
                async for response in inner(request, context):
                    yield response
                code = _code(context)
            except Exception as error:
                code = _code_of_failure(error, context)
                raise
            finally:
                counts.end(method, code, began_ns=began_ns)

        make = _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
        metered = stream if inspect.isasyncgenfunction(inner) else call
        return make(metered, handler.request_deserializer, handler.response_serializer)


def _code(context: Any) -> str:
    code = context.code()
    return _CODES[code.value[0] if isinstance(code, grpc.StatusCode) else code or 0]


def _code_of_failure(error: BaseException, context: CallContext) -> str:
    """The status of a call whose handler raised: its own, the leaving caller's, or grpc.aio's."""
    if isinstance(error, grpc.aio.AbortError):
        return _code(context)
    if isinstance(error, asyncio.CancelledError):
        return "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
    return "UNKNOWN"
