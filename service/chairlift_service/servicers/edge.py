"""The edge between handlers and gRPC: every way in which a handler can end becomes a status, once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

import grpc
import structlog

from chairlift_service import errors
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.validate import is_name

_TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate"})

_log = structlog.get_logger(__name__)

_Self = TypeVar("_Self")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class CallContext(Protocol):
    """What handlers use of grpc.aio.ServicerContext, whose own type needs to know both messages."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline, not below 0; None if it has none."""
        ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What the caller sent along."""
        ...

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Sends it now; without this it goes along with the first message."""
        ...

    async def write(self, message: Any) -> None:
        """Sends one message of a response stream."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str = ..., trailing_metadata: Any = ...) -> Any:
        """Ends the call by raising grpc.aio.AbortError."""
        ...


Handler = Callable[[_Self, _Request, CallContext], Awaitable[_Response]]


def guarded(handler: Handler[_Self, _Request, _Response]) -> Handler[_Self, _Request, _Response]:
    """Wraps a handler, written as a coroutine also where it streams.

    (An async generator is not closed at once where its call is cancelled while a message is written, so its
    clean-up would run late, or not at all.)

    - ServiceError becomes its status.
    - A cancellation from gRPC (the caller left, its deadline passed, the server stops) goes through.
    - A cancellation that server code raised would leave the caller without any status: it is a fault, INTERNAL.
    - So is any other exception; the log has it, the caller does not.
    """

    @functools.wraps(handler)
    async def guard(self: _Self, request: _Request, context: CallContext) -> _Response:
        try:
            return await handler(self, request, context)
        except ServiceError as error:
            fault = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            _log.exception("a cancellation escaped", method=handler.__name__)
            fault = ServiceError(Reason.INTERNAL, "a fault of the service; its log has more")
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError:
            # The caller is gone, or the message is over its limit: gRPC's core has ended the call with a status.
            _log.debug("a message could not be sent", method=handler.__name__)
            raise asyncio.CancelledError from None
        except Exception:  # noqa: BLE001 - whatever it is, the caller must get a status
            _log.exception("a handler failed", method=handler.__name__)
            fault = ServiceError(Reason.INTERNAL, "a fault of the service; its log has more")
        _log.debug("call refused or failed", method=handler.__name__, reason=fault.reason.value)
        await errors.abort(context, fault)
        raise AssertionError("abort returned")

    return guard


def log_under(request_id: str) -> None:
    """Puts the id into every log line of this call; one that is no name the log has no use for."""
    if is_name(request_id):
        structlog.contextvars.bind_contextvars(request_id=request_id)


def trace_headers(context: CallContext) -> dict[str, str]:
    """The caller's trace, as W3C Trace Context has it."""
    return {key: str(value) for key, value in context.invocation_metadata() or () if key in _TRACE_HEADERS}


def request_id_metadata(request_id: str) -> tuple[tuple[str, str | bytes], ...]:
    """Initial metadata that names the request, in the binary form where a header could not carry it as it is."""
    if request_id.isascii() and request_id == request_id.strip():
        return (("chairlift-request-id", request_id),)
    return (("chairlift-request-id-bin", request_id.encode()),)
