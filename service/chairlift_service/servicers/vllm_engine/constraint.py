"""From a gateway's constraints to the service's own."""

from __future__ import annotations

import json
from typing import Any

from chairlift.v1 import request_pb2

from chairlift_service.errors import Reason
from chairlift_service.faults import Faults


def add_constraint(message: request_pb2.GenerationRequest, params: Any, *, faults: Faults) -> None:
    """Adds that of a gateway's sampling parameters to the service's own message."""
    match params.WhichOneof("constraint"):
        case None:
            pass
        case "choice":
            message.constraint.choices.texts.extend(params.choice.choices)
            message.constraint.choices.SetInParent()
        case "structural_tag":
            _add_tags(message.constraint.tagged_text, params.structural_tag, faults=faults)
        case form:
            setattr(message.constraint, form, getattr(params, form))


def _add_tags(tagged: request_pb2.TaggedText, text: str, *, faults: Faults) -> None:
    """Of `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`; newer forms are refused."""
    tagged.SetInParent()
    try:
        said = json.loads(text)
        structures, triggers = said["structures"], said["triggers"]
        for each in structures:
            begin, schema, end = str(each["begin"]), json.dumps(each["schema"]), str(each["end"])
            trigger = next((str(one) for one in triggers if begin.startswith(str(one))), "")
            tagged.tags.add(begin=begin, trigger=trigger, json_schema=schema, end=end)
    except (ValueError, TypeError, KeyError, AttributeError):
        why = "only structures with begin, schema and end, and their triggers, are supported by this version"
        faults.add("sampling_params.structural_tag", why, Reason.UNSUPPORTED_OPTION)
