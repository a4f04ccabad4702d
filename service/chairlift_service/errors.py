"""The closed table of reasons for which the service refuses or fails a request.

A reason stands in the `google.rpc.ErrorInfo` of a status (domain `chairlift`); its gRPC code, and whether trying again
can help, follow from it. What a client sees is bounded: gRPC drops trailers above 8 KB, and the caller would get
RESOURCE_EXHAUSTED instead of the cause.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN: Final = "chairlift"
MAX_MESSAGE_BYTES: Final = 1024
MAX_VIOLATIONS_BYTES: Final = 2048
MAX_DESCRIPTION_BYTES: Final = 256


class Reason(enum.StrEnum):
    """Why a request was refused or failed."""

    INVALID_VALUE = "INVALID_VALUE"
    MISSING_INPUT = "MISSING_INPUT"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    UNKNOWN_TOKEN_ID = "UNKNOWN_TOKEN_ID"  # noqa: S105 - a reason's name, no secret
    UNSUPPORTED_OPTION = "UNSUPPORTED_OPTION"
    TEMPLATE_ERROR = "TEMPLATE_ERROR"
    NO_CHAT_TEMPLATE = "NO_CHAT_TEMPLATE"
    UNREADABLE_REQUEST = "UNREADABLE_REQUEST"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    RESULT_EXPIRED = "RESULT_EXPIRED"
    READER_REPLACED = "READER_REPLACED"
    READER_TOO_SLOW = "READER_TOO_SLOW"
    QUEUE_FULL = "QUEUE_FULL"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    DRAINING = "DRAINING"
    WRONG_STATE = "WRONG_STATE"
    INVALID_WEIGHTS = "INVALID_WEIGHTS"
    STOPPED = "STOPPED"
    NOT_READY = "NOT_READY"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    WORKER_LOST = "WORKER_LOST"
    NUMERICAL_ERROR = "NUMERICAL_ERROR"
    POISONED_REQUEST = "POISONED_REQUEST"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Row:
    """What holds for one reason."""

    code: grpc.StatusCode
    meaning: str
    retry_after: float | None = None  # seconds; None: trying the same again cannot help


_CODE = grpc.StatusCode
TABLE: Final[Mapping[Reason, Row]] = {
    Reason.INVALID_VALUE: Row(_CODE.INVALID_ARGUMENT, "A value is out of its range."),
    Reason.MISSING_INPUT: Row(_CODE.INVALID_ARGUMENT, "The request says nothing to continue."),
    Reason.EMPTY_PROMPT: Row(_CODE.INVALID_ARGUMENT, "The prompt has no tokens."),
    Reason.PROMPT_TOO_LONG: Row(_CODE.INVALID_ARGUMENT, "The prompt does not fit the context or the cache."),
    Reason.UNKNOWN_TOKEN_ID: Row(_CODE.INVALID_ARGUMENT, "A token id is outside the vocabulary."),
    Reason.UNSUPPORTED_OPTION: Row(_CODE.INVALID_ARGUMENT, "An option that this version cannot honour."),
    Reason.TEMPLATE_ERROR: Row(_CODE.INVALID_ARGUMENT, "The model's chat template refuses the conversation."),
    Reason.NO_CHAT_TEMPLATE: Row(_CODE.FAILED_PRECONDITION, "The model has no chat template."),
    Reason.UNREADABLE_REQUEST: Row(_CODE.INTERNAL, "The bytes of the request are no message of its call."),
    Reason.UNAUTHENTICATED: Row(_CODE.UNAUTHENTICATED, "The token is missing, or not one of the service's."),
    Reason.PERMISSION_DENIED: Row(_CODE.PERMISSION_DENIED, "The token is not good for this call."),
    Reason.DUPLICATE_REQUEST_ID: Row(_CODE.ALREADY_EXISTS, "The request id belongs to a live request."),
    Reason.REQUEST_NOT_FOUND: Row(_CODE.NOT_FOUND, "No request of this id is live or kept."),
    Reason.RESULT_EXPIRED: Row(_CODE.OUT_OF_RANGE, "The result, or its part from this index, is no longer kept."),
    Reason.READER_REPLACED: Row(_CODE.ABORTED, "Another reader took the result over."),
    Reason.READER_TOO_SLOW: Row(
        _CODE.RESOURCE_EXHAUSTED, "The stream was read too slowly for too long.", retry_after=1.0
    ),
    Reason.QUEUE_FULL: Row(_CODE.RESOURCE_EXHAUSTED, "Too many requests wait.", retry_after=1.0),
    Reason.MESSAGE_TOO_LARGE: Row(_CODE.RESOURCE_EXHAUSTED, "The request is larger than what the service passes on."),
    Reason.DRAINING: Row(_CODE.FAILED_PRECONDITION, "The service finishes what it has and takes nothing new."),
    Reason.WRONG_STATE: Row(_CODE.FAILED_PRECONDITION, "The state of the service does not allow this operation."),
    Reason.INVALID_WEIGHTS: Row(_CODE.INVALID_ARGUMENT, "The weights do not fit the running model."),
    Reason.STOPPED: Row(_CODE.UNAVAILABLE, "An operator stopped the service.", retry_after=1.0),
    Reason.NOT_READY: Row(_CODE.UNAVAILABLE, "The model is being loaded.", retry_after=1.0),
    Reason.DEADLINE_EXCEEDED: Row(_CODE.DEADLINE_EXCEEDED, "The caller's deadline passed."),
    Reason.SHUTTING_DOWN: Row(_CODE.UNAVAILABLE, "The service ends.", retry_after=1.0),
    Reason.WORKER_LOST: Row(_CODE.UNAVAILABLE, "The process that computes is gone.", retry_after=1.0),
    Reason.NUMERICAL_ERROR: Row(_CODE.INTERNAL, "The computation of this request gave no finite numbers."),
    Reason.POISONED_REQUEST: Row(_CODE.INTERNAL, "The computation of this request failed."),
    Reason.INTERNAL: Row(_CODE.INTERNAL, "A fault of the service."),
}


def table() -> Iterator[tuple[str, str, str, str]]:
    """Rows of text (reason, gRPC code, whether RetryInfo goes along, meaning), for documentation."""
    for reason, row in TABLE.items():
        yield reason.value, row.code.name, "yes" if row.retry_after is not None else "no", row.meaning


@dataclass(frozen=True, slots=True)
class Violation:
    """One field at fault."""

    field: str  # proto field path, such as `request.sampling.top_p`
    description: str
    reason: Reason = Reason.INVALID_VALUE


class ServiceError(Exception):
    """A request is refused, or has failed, for a reason of the table.

    `message` and `violations` go to the caller: they must name no other user's data. `metadata` holds the limits at
    hand; its keys are lower camel or snake case. `retry_after`, in seconds, replaces the table's.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        violations: Sequence[Violation] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = clean(message)
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})
        self.retry_after = TABLE[reason].retry_after if retry_after is None else retry_after

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC code of the reason."""
        return TABLE[self.reason].code

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def clean(text: str, *, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """`text` without control characters, cut to `max_bytes` of UTF-8 on a character border.

    Of a text that is much longer only the beginning is looked at: callers' own may be megabytes.
    """
    printable = "".join(c for c in text[: 4 * max_bytes] if c.isprintable())
    return printable.encode()[:max_bytes].decode(errors="ignore")


def from_violations(violations: Sequence[Violation], *, metadata: Mapping[str, str] | None = None) -> ServiceError:
    """The refusal of a request for all of its faults; the first one gives the reason. Needs at least one."""
    first = violations[0]
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    head = clean(f"{first.field}: {first.description}", max_bytes=MAX_MESSAGE_BYTES - len(more))
    return ServiceError(first.reason, head + more, violations=violations, metadata=metadata)


def from_worker(error: str) -> ServiceError:
    """The failure behind an ending with ERROR: `REASON: sentence`. What has another form is INTERNAL."""
    name, _, sentence = error.partition(":")
    reason = Reason(name) if name in Reason.__members__ else Reason.INTERNAL
    return ServiceError(reason, sentence.strip() or TABLE[reason].meaning)


def status(error: ServiceError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error, within what a trailer can carry."""
    details = [error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.metadata)]
    if error.violations:
        details.append(_bad_request(error.violations))
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(_milliseconds(error.retry_after))
        details.append(retry)
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    code: int = error.code.value[0]
    return status_pb2.Status(code=code, message=error.message, details=packed)


def trailers(error: ServiceError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata: the status, and when a client that retries by itself may do so (never: -1)."""
    metadata: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status(error).SerializeToString())]
    if error.retry_after is not None:
        metadata.append(("grpc-retry-pushback-ms", str(_milliseconds(error.retry_after))))
    elif error.code in (_CODE.RESOURCE_EXHAUSTED, _CODE.UNAVAILABLE):
        metadata.append(("grpc-retry-pushback-ms", "-1"))
    return tuple(metadata)


class Abortable(Protocol):
    """The part of grpc.aio.ServicerContext that ends a call."""

    async def abort(
        self, code: grpc.StatusCode, details: str = ..., trailing_metadata: tuple[tuple[str, str | bytes], ...] = ...
    ) -> NoReturn:
        """Ends the call by raising grpc.aio.AbortError."""


async def abort(context: Abortable, error: ServiceError) -> NoReturn:
    """Ends a call of grpc.aio with `error`. Raises grpc.aio.AbortError, which handlers must let through."""
    await context.abort(error.code, error.message, trailers(error))


def _bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    """As many of the violations as a trailer has room for; the message tells how many there were."""
    bad = error_details_pb2.BadRequest()
    for violation in violations:
        description = clean(violation.description, max_bytes=MAX_DESCRIPTION_BYTES)
        bad.field_violations.add(field=violation.field, description=description, reason=violation.reason.value)
        if bad.ByteSize() > MAX_VIOLATIONS_BYTES:
            del bad.field_violations[-1]
            break
    return bad


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))
