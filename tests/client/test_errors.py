from __future__ import annotations

import chairlift_client as client
import grpc
import pytest
from chairlift_client import _errors
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2


class Failed(grpc.RpcError):
    """A failed call as gRPC presents it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._parts = (code, details, trailers)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._parts[2]


def details_of(*messages: object) -> list[any_pb2.Any]:
    packed = []
    for message in messages:
        packed.append(any_pb2.Any())
        packed[-1].Pack(message)
    return packed


def trailers(*messages: object) -> tuple[tuple[str, bytes], ...]:
    status = status_pb2.Status(code=13, message="inner", details=details_of(*messages))
    return (("x", b"y"), ("grpc-status-details-bin", status.SerializeToString()))


# The rows of the API's error table.
ROWS = [
    (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_TOKEN_ID", client.InvalidRequestError),
    (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", client.DuplicateRequestError),
    (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", client.NotFoundError),
    (grpc.StatusCode.OUT_OF_RANGE, "RESULT_EXPIRED", client.ResultExpiredError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", client.OverloadedError),
    (grpc.StatusCode.FAILED_PRECONDITION, "DRAINING", client.PreconditionError),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", client.DeadlineExceededError),
    (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST", client.UnavailableError),
    (grpc.StatusCode.INTERNAL, "POISONED_REQUEST", client.PoisonedRequestError),
    (grpc.StatusCode.INTERNAL, "NUMERICAL_ERROR", client.NumericalError),
    (grpc.StatusCode.ABORTED, "READER_REPLACED", client.TakenOverError),
    (grpc.StatusCode.UNAUTHENTICATED, "", client.UnauthenticatedError),
    (grpc.StatusCode.PERMISSION_DENIED, "", client.PermissionDeniedError),
    (grpc.StatusCode.DATA_LOSS, "", client.ChairliftError),
]


@pytest.mark.parametrize(("code", "reason", "kind"), ROWS)
def test_status_and_reason_choose_the_class(
    code: grpc.StatusCode, reason: str, kind: type[client.ChairliftError]
) -> None:
    info = error_details_pb2.ErrorInfo(reason=reason, domain="chairlift", metadata={"limit": "5"})
    error = _errors.from_rpc_error(Failed(code, "outer", trailers(info)))
    assert type(error) is kind
    assert (error.code, error.reason, error.message) == (code, reason or None, "outer")
    assert error.metadata == {"limit": "5"}


def test_violations_and_the_time_to_wait_are_read_from_the_details() -> None:
    bad = error_details_pb2.BadRequest(field_violations=[{"field": "request.seed", "description": "too large"}])
    retry = error_details_pb2.RetryInfo(retry_delay={"seconds": 1, "nanos": 500_000_000})
    error = _errors.from_rpc_error(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailers(bad, retry)))
    assert error.field_violations == (client.FieldViolation("request.seed", "too large"),)
    assert error.retry_after == 1.5


@pytest.mark.parametrize("metadata", [(), (("grpc-status-details-bin", b"\xff\xff no protobuf"),)])
def test_without_readable_details_the_code_alone_speaks(metadata: tuple[tuple[str, bytes], ...]) -> None:
    error = _errors.from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, "refused", metadata))
    assert type(error) is client.UnavailableError
    assert (error.reason, error.message, error.retry_after) == (None, "refused", None)
    assert str(error) == "UNAVAILABLE: refused"


def test_the_services_own_table_turns_into_these_errors() -> None:
    """The two tables are inverse: no reason of the service becomes a class of another status."""
    service = pytest.importorskip("chairlift_service.errors")
    for reason, row in service.TABLE.items():
        info = error_details_pb2.ErrorInfo(reason=reason.value, domain="chairlift")
        error = _errors.from_rpc_error(Failed(row.code, "x", trailers(info)))
        by_code = _errors.ErrorTable.by_code[row.code]
        assert isinstance(error, by_code), reason
        assert by_code is not client.ChairliftError
    known = {reason.value for reason in service.TABLE}
    assert known >= _errors.ErrorTable.by_reason.keys()
