"""Options that the API has and this version cannot honour: refused by name, never dropped."""

from __future__ import annotations

from typing import Final

from chairlift.v1 import request_pb2

from chairlift_service.errors import Reason
from chairlift_service.faults import Faults

_NOT_YET: Final = ("constraint",)


def refuse(request: request_pb2.GenerationRequest, *, path: str, faults: Faults) -> None:
    """Adds a fault for each of these that the request names."""
    given = {descriptor.name for descriptor, _ in request.ListFields()}
    for name in _NOT_YET:
        if name in given:
            faults.add(f"{path}.{name}", "this version cannot do that yet; leave it unset", Reason.UNSUPPORTED_OPTION)
