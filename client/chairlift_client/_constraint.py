"""A form that an output must have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chairlift.v1 import request_pb2


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A part of a text: `begin`, JSON that the schema allows, `end`.

    A `trigger` is a beginning of `begin` that is enough to open the part; the rest of it follows then.
    """

    begin: str
    json_schema: Mapping[str, Any] | str
    end: str
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A form that an output must have, made by one of its methods.

    An answer that ends with STOP has it, unless a stop of your own cut it short; one that a limit or a cancel ended is
    a beginning of it. White space between the parts of JSON is bounded.
    """

    _message: request_pb2.Constraint

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """A JSON value that the schema allows.

        >>> Constraint.json_schema({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
        Constraint(json_schema='{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}')
        """
        return cls(request_pb2.Constraint(json_schema=_as_json(schema)))

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls(request_pb2.Constraint(json_object=True))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """What the regular expression matches as a whole, in the syntax of Rust's regex crate; no look-around.

        >>> Constraint.regex(r"[A-Z][a-z]+ [0-9]{4}")
        Constraint(regex='[A-Z][a-z]+ [0-9]{4}')
        """
        return cls(request_pb2.Constraint(regex=pattern))

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """What a context-free grammar derives, in Lark's or GBNF's form."""
        return cls(request_pb2.Constraint(grammar=text))

    @classmethod
    def choices(cls, texts: Iterable[str]) -> Constraint:
        """One of these texts.

        >>> Constraint.choices(["yes", "no"])
        Constraint(choices=['yes', 'no'])
        """
        return cls(request_pb2.Constraint(choices=request_pb2.TextChoices(texts=texts)))

    @classmethod
    def tagged_text(cls, tags: Iterable[StructuralTag]) -> Constraint:
        """Free text in which certain beginnings open parts with a form of their own, such as calls of tools."""
        messages = [
            request_pb2.StructuralTag(
                begin=tag.begin, trigger=tag.trigger, json_schema=_as_json(tag.json_schema), end=tag.end
            )
            for tag in tags
        ]
        return cls(request_pb2.Constraint(tagged_text=request_pb2.TaggedText(tags=messages)))

    def message(self) -> request_pb2.Constraint:
        """The API's form of it."""
        return self._message

    def __repr__(self) -> str:
        form = self._message.WhichOneof("form") or ""
        value = getattr(self._message, form)
        if form == "choices":
            value = list(value.texts)
        elif form == "tagged_text":
            value = [tag.begin for tag in value.tags]
        return f"Constraint({form}={value!r})"


def _as_json(schema: Mapping[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
