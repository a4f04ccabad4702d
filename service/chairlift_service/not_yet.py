"""Options that the API has and this version cannot honour: refused by name, never dropped."""

from __future__ import annotations

from typing import Final

from chairlift.v1 import request_pb2
from google.protobuf.message import Message

from chairlift_service.errors import Reason
from chairlift_service.faults import Faults

_NOT_YET: Final = (
    "num_choices",
    "constraint",
    "logprobs.prompt_top_n",
)


def refuse(request: request_pb2.GenerationRequest, *, path: str, faults: Faults) -> None:
    """Adds a fault for each of these that the request names."""
    for name in _NOT_YET:
        message: Message = request
        field = name
        if "." in name:
            outer, field = name.split(".")
            message = getattr(request, outer)
        if any(descriptor.name == field for descriptor, _ in message.ListFields()):
            faults.add(f"{path}.{name}", "this version cannot do that yet; leave it unset", Reason.UNSUPPORTED_OPTION)
