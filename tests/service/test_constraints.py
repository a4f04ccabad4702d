"""Constraints as the service reads them: good ones become grammars, bad ones are refused by name, in bounded time."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from chairlift.v1 import request_pb2
from chairlift_service import constraints as module
from chairlift_service.constraints import MAX_BYTES, MAX_TEXTS, Constraints
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.faults import Faults
from chairlift_service.text.tokenizer import Tokenizer
from support.tokenizer_files import byte_level
from support.validation import at, refusal, valid

TOKENIZER = Tokenizer(backend=byte_level())
TAG = {"begin": "<f=add>", "trigger": "<f", "json_schema": '{"type": "integer"}', "end": "</f>"}


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": '{"type": "object"}'},
        {"json_object": True},
        {"regex": r"[a-z]+(\.[0-9]{1,3})?"},
        {"grammar": 'start: "a" start "b" | "c"'},
        {"grammar": 'root ::= "a" root "b" | "c"'},
        {"choices": {"texts": ['one "quoted"', "two\nlines", "\u65e5\u672c \\ back"]}},
        {"tagged_text": {"tags": [TAG, {**TAG, "begin": "<g>", "trigger": ""}]}},
    ],
)
async def test_each_form_becomes_a_grammar(form: dict[str, Any]) -> None:
    assert (await valid(constraint=form)).grammar
    assert not (await valid()).grammar


@pytest.mark.parametrize(
    ("form", "path", "reason"),
    [
        ({}, "", "MISSING_INPUT"),
        ({"json_schema": ""}, ".json_schema", "MISSING_INPUT"),
        ({"json_schema": "{"}, ".json_schema", "INVALID_VALUE"),
        ({"json_schema": "[]"}, ".json_schema", "INVALID_VALUE"),
        ({"json_schema": '{"type": "nothing"}'}, ".json_schema", "INVALID_VALUE"),
        (
            {"json_schema": '{"type": "string", "unheard": {"of": 1}, "not": {"const": 1}}'},
            ".json_schema",
            "INVALID_VALUE",
        ),
        ({"json_schema": '{"$ref": "https://example.org/schema.json"}'}, ".json_schema", "INVALID_VALUE"),
        ({"json_object": False}, ".json_object", "INVALID_VALUE"),
        ({"regex": "(a"}, ".regex", "INVALID_VALUE"),
        ({"regex": "(?=a)b"}, ".regex", "INVALID_VALUE"),
        ({"regex": r"(a)\1"}, ".regex", "INVALID_VALUE"),
        ({"grammar": "start: nothing"}, ".grammar", "INVALID_VALUE"),
        ({"grammar": "what is this?"}, ".grammar", "INVALID_VALUE"),
        ({"regex": "a" * MAX_BYTES}, ".regex", "INVALID_VALUE"),
        ({"choices": {}}, ".choices.texts", "INVALID_VALUE"),
        ({"choices": {"texts": ["a"] * (MAX_TEXTS + 1)}}, ".choices.texts", "INVALID_VALUE"),
        ({"choices": {"texts": ["a", ""]}}, ".choices.texts[1]", "INVALID_VALUE"),
        ({"tagged_text": {}}, ".tagged_text.tags", "MISSING_INPUT"),
        ({"tagged_text": {"tags": [{**TAG, "begin": ""}]}}, ".tagged_text.tags[0].begin", "INVALID_VALUE"),
        ({"tagged_text": {"tags": [TAG, {**TAG, "trigger": "x"}]}}, ".tagged_text.tags[1].begin", "INVALID_VALUE"),
        ({"tagged_text": {"tags": [{**TAG, "end": ""}]}}, ".tagged_text.tags[0].end", "MISSING_INPUT"),
        ({"tagged_text": {"tags": [{**TAG, "json_schema": "1"}]}}, ".tagged_text", "INVALID_VALUE"),
        ({"tagged_text": {"tags": [{**TAG, "json_schema": '{"type": "x"}'}]}}, ".tagged_text", "INVALID_VALUE"),
    ],
)
async def test_a_wrong_one_is_refused_by_name(form: dict[str, Any], path: str, reason: str) -> None:
    error = await refusal(constraint=form)
    assert at(error) == [(reason, f"request.constraint{path}")]
    assert all(len(each.description) < 400 and each.description.isprintable() for each in error.violations)


async def test_as_many_texts_as_may_be_are_taken() -> None:
    texts = [f"choice number {number}" for number in range(MAX_TEXTS)]
    assert (await valid(constraint={"choices": {"texts": texts}})).grammar


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(.*a){50}[ab]{200}"},
        {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
        {"regex": r"[\w\s]{1,5000}" * 400},
        {"grammar": "start: " + " ".join(["a?"] * 20000) + '\na: "x"'},
        {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
        {
            "json_schema": '{"anyOf": ['
            + ",".join(f'{{"pattern": "^{"a" * i}.*b{{1,900}}$"}}' for i in range(400))
            + "]}"
        },
        {"json_schema": '{"items": ' * 10000 + "{}" + "}" * 10000},
        {
            "json_schema": json.dumps(
                {"properties": {f"k{i}": {"pattern": f"^[a-z]{{1,{i + 1}}}$"} for i in range(4000)}}
            )
        },
        {
            "json_schema": json.dumps(
                {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % 999}"} for i in range(999)}, "$ref": "#/$defs/d0"}
            )
        },
    ],
)
async def test_hostile_ones_are_taken_or_refused_within_the_time_and_hold_nobody_up(form: dict[str, Any]) -> None:
    constraints, faults = Constraints(), Faults()
    request = request_pb2.GenerationRequest(constraint=form)
    worst, begin = 0.0, time.monotonic()
    reading = asyncio.create_task(constraints.read(request, path="request", tokenizer=TOKENIZER, faults=faults))
    while not reading.done():
        before = time.monotonic()
        await asyncio.sleep(0.001)
        worst = max(worst, time.monotonic() - before)
    assert bool(await reading) or faults.violations
    assert time.monotonic() - begin < module.TIME_LIMIT_S
    assert worst < 0.5


async def test_a_verdict_is_remembered_and_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(grammar: str) -> str:
        looked.append(grammar)
        return ""

    monkeypatch.setattr(module, "_look_at", look)
    monkeypatch.setattr(module, "MAX_KNOWN", 3)
    constraints = Constraints()
    for text in "aabcdda":
        request = request_pb2.GenerationRequest(constraint={"regex": text})
        assert await constraints.read(request, path="request", tokenizer=TOKENIZER, faults=Faults())
    assert len(looked) == 5, "the first was forgotten"


async def test_too_many_and_too_slow_ones_are_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_look_at", lambda _: time.sleep(0.3) or "")
    monkeypatch.setattr(module, "TIME_LIMIT_S", 0.1)
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    constraints = Constraints()

    async def read(text: str) -> str:
        request = request_pb2.GenerationRequest(constraint={"regex": text})
        return await constraints.read(request, path="request", tokenizer=TOKENIZER, faults=Faults())

    found = await asyncio.gather(*(read(text) for text in "abcd"), return_exceptions=True)
    assert all(isinstance(each, ServiceError) and each.reason is Reason.QUEUE_FULL for each in found)
    await asyncio.sleep(1.1)
    monkeypatch.setattr(module, "_look_at", lambda _: "")
    assert await read("e")


async def test_a_special_token_can_open_a_part() -> None:
    tag = {**TAG, "begin": "<|end|>", "trigger": ""}
    as_token = (await valid(constraint={"tagged_text": {"tags": [tag]}}, tokenizer=TOKENIZER)).grammar
    as_text = (
        await valid(constraint={"tagged_text": {"tags": [{**tag, "begin": "<|ent|>"}]}}, tokenizer=TOKENIZER)
    ).grammar
    assert '"<|end|>"' not in as_token
    assert '"<|ent|>"' in as_text
