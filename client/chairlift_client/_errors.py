"""Errors of the client: one class for each status, and for those reasons that a caller may want to tell apart.

The inverse of the service's table. What a call failed with is read from the status details that the service sends
(`google.rpc.Status` in the trailer `grpc-status-details-bin`); an error that brings none, because it comes from gRPC
itself or a proxy, is told by its code alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import grpc
from google.protobuf import message as protobuf_message
from google.rpc import error_details_pb2, status_pb2

DETAILS_TRAILER: Final = "grpc-status-details-bin"
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request: `field` is its path in the proto, `requests[3].sampling.top_p`."""

    field: str
    description: str


class ChairliftError(Exception):
    """A call that failed, or one request's failure in a stream of a session."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str | None = None,
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        """The gRPC status."""
        self.reason = reason
        """The service's reason, such as `UNKNOWN_TOKEN_ID`; None where the service did not speak."""
        self.metadata = metadata or {}
        """What belongs to the reason: limits, for instance."""
        self.retry_after = retry_after
        """Seconds after which trying again can help; None where it cannot, or is not known."""
        self.field_violations = field_violations
        """Which fields are wrong, and how."""

    def __str__(self) -> str:
        told = f"{self.code.name} ({self.reason})" if self.reason else self.code.name
        return f"{told}: {self.message}"


class InvalidRequestError(ChairliftError):
    """A value is out of range, or the service cannot honour an option; `field_violations` names it."""


class DuplicateRequestError(ChairliftError):
    """The request id belongs to a live request."""


class NotFoundError(ChairliftError):
    """No such request, or it was forgotten."""


class ResultExpiredError(ChairliftError):
    """The tokens asked for are no longer kept."""


class OverloadedError(ChairliftError):
    """No room: the queue is full, the message too large, or the reader was too slow. See `retry_after`."""


class PreconditionError(ChairliftError):
    """The service, or its model, is not in the state that the call needs."""


class DeadlineExceededError(ChairliftError):
    """The call's time is over."""


class UnavailableError(ChairliftError):
    """Nobody answers, or the service is going away or has lost its worker. See `retry_after`."""


class TakenOverError(ChairliftError):
    """Another reader took over the stream of results."""


class UnauthenticatedError(ChairliftError):
    """The token is missing or wrong."""


class PermissionDeniedError(ChairliftError):
    """The caller may not make this call."""


class CallCancelledError(ChairliftError):
    """The call was cancelled."""


class UnsupportedCallError(ChairliftError):
    """The address does not answer this call; the admin calls have an address of their own."""


class InternalError(ChairliftError):
    """A bug in the service, or this request made the computation fail."""


class PoisonedRequestError(InternalError):
    """The worker died more than once with this request in its batch."""


class NumericalError(InternalError):
    """The model's output for this request was not a number."""


class ErrorTable:
    """Which error a status and reason become. A reason wins over the code."""

    by_code: ClassVar[dict[grpc.StatusCode, type[ChairliftError]]] = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
        grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
        grpc.StatusCode.NOT_FOUND: NotFoundError,
        grpc.StatusCode.OUT_OF_RANGE: ResultExpiredError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
        grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.ABORTED: TakenOverError,
        grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
        grpc.StatusCode.CANCELLED: CallCancelledError,
        grpc.StatusCode.UNIMPLEMENTED: UnsupportedCallError,
        grpc.StatusCode.INTERNAL: InternalError,
    }
    by_reason: ClassVar[dict[str, type[ChairliftError]]] = {
        "DUPLICATE_REQUEST_ID": DuplicateRequestError,
        "REQUEST_NOT_FOUND": NotFoundError,
        "RESULT_EXPIRED": ResultExpiredError,
        "POISONED_REQUEST": PoisonedRequestError,
        "NUMERICAL_ERROR": NumericalError,
    }


def from_status(status: status_pb2.Status) -> ChairliftError:
    """The error that a `google.rpc.Status` tells of."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    retry_after = None
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad_request)
        if detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    kind = ErrorTable.by_reason.get(info.reason) or ErrorTable.by_code.get(code, ChairliftError)
    return kind(
        status.message,
        code=code,
        reason=info.reason or None,
        metadata=dict(info.metadata),
        retry_after=retry_after,
        field_violations=tuple(
            FieldViolation(field=v.field, description=v.description) for v in bad_request.field_violations
        ),
    )


def from_rpc_error(error: grpc.RpcError) -> ChairliftError:
    """The error that a failed call tells of; `error` is a grpc or a grpc.aio one."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_TRAILER:
            try:
                status = status_pb2.Status.FromString(value)
            except protobuf_message.DecodeError:
                break
            # gRPC's own code and message are what the call ended with; the details only add to them.
            status.code, status.message = error.code().value[0], error.details() or status.message
            return from_status(status)
    return from_status(status_pb2.Status(code=error.code().value[0], message=error.details() or ""))
