"""Calls that the fake server ends with a status, in the form in which the service does."""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2


class Refusal(Exception):  # noqa: N818 # it is the service's answer, not an error of this code
    """End the call with this status."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status_pb2.Status(code=code.value[0], message=message)
        if reason:
            self._add(error_details_pb2.ErrorInfo(reason=reason, domain="chairlift"))
        if field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
            self._add(error_details_pb2.BadRequest(field_violations=[violation]))
        if retry_after is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(round(retry_after * 1000))
            self._add(retry)

    @classmethod
    def field(cls, field: str, message: str, *, reason: str) -> Refusal:
        """An INVALID_ARGUMENT that names a field."""
        return cls(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}", reason=reason, field=field)

    def abort(self, context: grpc.ServicerContext) -> NoReturn:
        """End the call."""
        context.set_trailing_metadata((("grpc-status-details-bin", self.status.SerializeToString()),))
        context.abort(self.code, self.status.message)
        raise AssertionError("abort returned")

    def _add(self, detail: object) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        self.status.details.append(packed)
