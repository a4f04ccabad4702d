"""From the form that an output must have to a grammar that the worker can follow.

The grammars are llguidance's. They are looked at here, so that a bad one is refused before the request is admitted: off
the event loop, within bounds of size, work and time, and each once as long as it is remembered.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from chairlift.v1 import request_pb2
from llguidance import LLMatcher, LLParserLimits, StructTag, grammar_from

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.faults import Faults
from chairlift_service.text.tokenizer import Tokenizer

MAX_BYTES: Final = 256 * 1024
"""Of a constraint."""

MAX_TEXTS: Final = 4096
"""To choose one from."""

TIME_LIMIT_S: Final = 5.0
"""For looking at a constraint, those before it included; one alone takes milliseconds, a hostile one some tenths."""

MAX_WAITING: Final = 64
"""Constraints that are being looked at; more are refused for a while."""

MAX_KNOWN: Final = 1024
"""Grammars whose verdict is remembered."""

# Between the parts of JSON: enough for lines and their indentation, and an end to a model that would go on with it.
_WHITE_SPACE: Final = r"[ \t\n\r]{0,32}"
_ANY_TEXT: Final = r"(.|\n)*"
_MAX_ERROR_LEN: Final = 300

Grammar = str
"""As the worker takes it."""


class Constraints:
    """Makes grammars, and remembers which of them are good."""

    def __init__(self) -> None:
        self._known: OrderedDict[Grammar, str] = OrderedDict()  # and what is wrong with it, or nothing
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._num_waiting = 0

    async def read(
        self, request: request_pb2.GenerationRequest, *, path: str, tokenizer: Tokenizer, faults: Faults
    ) -> Grammar:
        """The grammar of a request's constraint; empty if it has none, and, with a fault, for one that is wrong.

        `path` is the request's. Raises ServiceError: QUEUE_FULL where too many are being looked at.
        """
        if not request.HasField("constraint"):
            return ""
        constraint, path = request.constraint, f"{path}.constraint"
        form = constraint.WhichOneof("form")
        if form is None:
            faults.add(path, "one of its forms must be set", Reason.MISSING_INPUT)
            return ""
        where = f"{path}.{form}"
        if constraint.ByteSize() > MAX_BYTES:
            faults.add(where, f"has {constraint.ByteSize()} bytes, at most {MAX_BYTES}")
            return ""
        _check_plain(constraint, form=form, path=where, faults=faults)
        if any(violation.field.startswith(where) for violation in faults.violations):
            return ""
        try:
            grammar = _grammar_of(constraint, form=form, tokenizer=tokenizer)
        except (ValueError, AssertionError) as error:
            faults.add(where, _shortened(str(error)))
            return ""
        error_text = await self._verdict(grammar)
        if error_text:
            faults.add(where, error_text)
        return grammar

    async def _verdict(self, grammar: Grammar) -> str:
        """What is wrong with it; nothing if it can be followed."""
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return self._known[grammar]
        if self._num_waiting >= MAX_WAITING:
            raise ServiceError(Reason.QUEUE_FULL, f"{self._num_waiting} constraints are being looked at")
        self._num_waiting += 1
        looking = asyncio.get_running_loop().run_in_executor(self._thread, _look_at, grammar)
        looking.add_done_callback(self._on_done)
        try:
            verdict = await asyncio.wait_for(asyncio.shield(looking), TIME_LIMIT_S)
        except TimeoutError:
            text = f"no constraint could be looked at within {TIME_LIMIT_S:g} s"
            raise ServiceError(Reason.QUEUE_FULL, text) from None
        self._known[grammar] = verdict
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return verdict

    def _on_done(self, looking: asyncio.Future[str]) -> None:
        self._num_waiting -= 1
        if not looking.cancelled():
            looking.exception()  # or asyncio complains of one that nobody waited for


def _check_plain(constraint: request_pb2.Constraint, *, form: str, path: str, faults: Faults) -> None:
    """What needs no grammar."""
    match form:
        case "json_object":
            if not constraint.json_object:
                faults.add(path, "must be true where it is set")
        case "choices":
            _check_texts(constraint.choices.texts, path=f"{path}.texts", faults=faults)
        case "tagged_text":
            tags = constraint.tagged_text.tags
            if not tags:
                faults.add(f"{path}.tags", "there are none", Reason.MISSING_INPUT)
            for i, tag in enumerate(tags):
                if not tag.begin or not tag.begin.startswith(tag.trigger):
                    faults.add(f"{path}.tags[{i}].begin", "must not be empty, and must begin with its trigger")
                if not tag.end:
                    faults.add(f"{path}.tags[{i}].end", "must not be empty", Reason.MISSING_INPUT)
        case _:
            if not getattr(constraint, form):
                faults.add(path, "must not be empty", Reason.MISSING_INPUT)


def _check_texts(texts: Sequence[str], *, path: str, faults: Faults) -> None:
    if not 1 <= len(texts) <= MAX_TEXTS:
        faults.add(path, f"has {len(texts)} texts, must have 1 to {MAX_TEXTS}")
    elif not all(texts):
        faults.add(f"{path}[{list(texts).index('')}]", "must not be empty")


def _grammar_of(constraint: request_pb2.Constraint, *, form: str, tokenizer: Tokenizer) -> Grammar:
    """Raises ValueError or AssertionError for one that is wrong on its face."""
    match form:
        case "json_schema":
            return _of_schema(constraint.json_schema)
        case "json_object":
            return _of_schema('{"type": "object"}')
        case "regex":
            return grammar_from("regex", constraint.regex)
        case "grammar":
            return grammar_from("grammar", constraint.grammar)
        case "choices":
            return grammar_from("choice", json.dumps(list(constraint.choices.texts), ensure_ascii=False))
        case _:
            return _of_tags(constraint.tagged_text.tags, tokenizer=tokenizer)


def _of_schema(schema: str) -> Grammar:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITE_SPACE})


def _of_tags(tags: Sequence[request_pb2.StructuralTag], *, tokenizer: Tokenizer) -> Grammar:
    parts = []
    for tag in tags:
        schema = json.loads(tag.json_schema)
        if not isinstance(schema, dict):
            raise ValueError("a tag's schema must be a JSON object")  # noqa: TRY004 - told to the caller
        schema["x-guidance"] = {"whitespace_pattern": _WHITE_SPACE}
        parts.append(StructTag(trigger=tag.trigger or tag.begin, begin=tag.begin, grammar=schema, end=tag.end))
    special = any(_is_special(part.trigger, tokenizer) for part in parts)
    return StructTag.to_grammar(parts, assume_special=special, text_regex=_ANY_TEXT)


def _is_special(text: str, tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return len(ids) == 1 and tokenizer.is_special(ids[0])


def _look_at(grammar: Grammar) -> str:
    limits = LLParserLimits(verbose_errors=False)
    return _shortened(LLMatcher.validate_grammar(grammar, limits=limits))


def _shortened(text: str) -> str:
    """In one line, without what the caller has said at length."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_ERROR_LEN else f"{line[:_MAX_ERROR_LEN]}..."
