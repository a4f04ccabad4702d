"""The largest messages that come in, and texts that a tokenizer's expressions take for ever on: others are answered."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from chairlift.v1 import chat_pb2, generation_service_pb2, request_pb2, text_service_pb2
from chairlift_service.text.tokenizer import MAX_FILE_BYTES, Tokenizer
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2
from support.serve_fake import COMMAND_LINE
from support.tokenizer_files import byte_level
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

_pb = generation_service_pb2
WHOLE = [(f"grpc.max_{way}_message_length", 16 * 2**20) for way in ("send", "receive")]
PATIENCE_S = 5.0  # what they used to take was half a minute and more
BACKTRACKING = "(a+)+$"
GIVES_UP = "a" * 40 + "!"
TAKES_LONG = ("a" * 21 + "! ") * 40


def backtracking() -> Backend:
    """A tokenizer as a stranger may send one."""
    tokenizer = byte_level()
    cut = pre_tokenizers.Split(Regex(BACKTRACKING), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(use_regex=False)])
    return tokenizer


@dataclass(frozen=True)
class Running:
    """A service in a process of its own, and the longest that a look at its health took."""

    channel: grpc.Channel
    slowest: list[float]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="cl") as folder:
        backtracking().save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "chat_template.jinja").write_text("{{ messages[0].content }}")
        address = f"unix:{folder}/s"
        process = subprocess.Popen(
            [*COMMAND_LINE, "--model", "fake", "--listen", address, "--log-level", "error"],
            env={**os.environ, "FAKE_WORKER": json.dumps({"tokenizer_dir": folder})},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        yield address
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.fixture
def running(target: str) -> Iterator[Running]:
    """Health is asked for by another connection all the time."""
    done, slowest = threading.Event(), [0.0]

    def look() -> None:
        with grpc.insecure_channel(target) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while not done.wait(0.01):
                began = time.monotonic()
                check(health_pb2.HealthCheckRequest(), timeout=120)
                slowest[0] = max(slowest[0], time.monotonic() - began)

    thread = threading.Thread(target=look)
    thread.start()
    with grpc.insecure_channel(target, options=WHOLE) as channel:
        try:
            yield Running(channel, slowest)
        finally:
            done.set()
            thread.join()
    assert slowest[0] < PATIENCE_S


def call(running: Running, method: str, message: Message | bytes) -> tuple[str, str, list[str]]:
    """Status, reason and fields of the answer."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    make = running.channel.unary_stream if method.endswith("/Generate") else running.channel.unary_unary
    try:
        answer: Any = make(f"/{method}" if "." in method else f"/chairlift.v1.{method}")(data, timeout=120)
        if method.endswith("/Generate"):
            list(answer)
    except grpc.RpcError as error:
        trailers = dict(error.trailing_metadata())  # type: ignore[attr-defined]  # it is a grpc.Call, too
        told = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        for detail in told.details:
            detail.Unpack(info)
            detail.Unpack(bad)
        assert len(told.message.encode()) <= 1024
        return error.code().name, info.reason, [violation.field for violation in bad.field_violations]
    return "OK", "", []


def generate(**fields: Any) -> _pb.GenerateRequest:
    return _pb.GenerateRequest(request=request_pb2.GenerationRequest(**fields))


def chat(**fields: Any) -> _pb.GenerateRequest:
    return generate(chat=chat_pb2.Chat(messages=[{"role": "user", "content": "x"}], **fields))


def nested(depth: int) -> bytes:
    """A message in a message in a message, as far as lengths go."""
    data = b""
    for _ in range(depth):
        data = b"\x0a" + bytes(_varint(len(data))) + data
    return data


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


MILLIONS: dict[str, tuple[Callable[[], Message | bytes], str, str, str]] = {
    "10 million ids": (
        lambda: generate(token_ids={"ids": [5] * 10_000_000}),
        "INVALID_ARGUMENT",
        "PROMPT_TOO_LONG",
        "request.token_ids",
    ),
    "10 million stop ids": (
        lambda: generate(token_ids={"ids": [5]}, stop={"token_ids": [6] * 10_000_000}),
        "INVALID_ARGUMENT",
        "INVALID_VALUE",
        "request.stop.token_ids",
    ),
    "100,000 stop ids": (
        lambda: generate(token_ids={"ids": [5]}, stop={"token_ids": [6] * 100_000}),
        "INVALID_ARGUMENT",
        "INVALID_VALUE",
        "request.stop.token_ids",
    ),
    "2 million tools": (
        lambda: chat(tools_json=[""] * 2_000_000),
        "INVALID_ARGUMENT",
        "INVALID_VALUE",
        "request.chat.tools_json",
    ),
    "a million documents": (
        lambda: chat(documents_json=["1"] * 1_300_000),
        "INVALID_ARGUMENT",
        "INVALID_VALUE",
        "request.chat.documents_json",
    ),
    "a million objects in JSON": (
        lambda: chat(template_arguments_json={"x": "[" * 70 + "{}," * 1_300_000 + "{}" + "]" * 70}),
        "INVALID_ARGUMENT",
        "INVALID_VALUE",
        'request.chat.template_arguments_json["x"]',
    ),
    "a text of 15 MB": (lambda: generate(text="x" * 15_000_000), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "request.text"),
    "groups in groups": (lambda: b"\x0b" * 100_000, "INTERNAL", "UNREADABLE_REQUEST", ""),
    "groups in groups that end": (
        lambda: b"\x7b" * 100_000 + b"\x7c" * 100_000,
        "INTERNAL",
        "UNREADABLE_REQUEST",
        "",
    ),
    "half a pair of surrogates": (
        lambda: b"\x0a\x07\x0a\x05a\xed\xa0\x80b",
        "INTERNAL",
        "UNREADABLE_REQUEST",
        "",
    ),
}


@pytest.mark.parametrize("name", MILLIONS)
def test_the_largest_messages_are_refused_by_field_and_health_answers_meanwhile(running: Running, name: str) -> None:
    make, code, reason, field = MILLIONS[name]
    found = call(running, "GenerationService/Generate", make())
    assert found == (code, reason, [field] if field else [])


@pytest.mark.parametrize(
    ("fields", "unknown", "reason", "field"),
    [
        ({"tokenized": {"input_ids": [5] * 10_000_000}}, b"", "PROMPT_TOO_LONG", "tokenized.input_ids"),
        (
            {"tokenized": {"input_ids": [5]}, "sampling_params": {"stop_token_ids": [6] * 10_000_000}},
            b"",
            "INVALID_VALUE",
            "sampling_params.stop_token_ids",
        ),
        (
            {"tokenized": {"input_ids": [5]}, "sampling_params": {"stop": ["x"] * 5_000_000}},
            b"",
            "INVALID_VALUE",
            "sampling_params.stop",
        ),
        ({"tokenized": {"input_ids": [5]}}, b"\xf8\x07\x01" * 5_000_000, "UNSUPPORTED_OPTION", "GenerateRequest"),
    ],
    ids=["ids", "stop ids", "stops", "unknown fields"],
)
def test_the_largest_messages_of_gateways_are_refused_by_field_and_health_answers_meanwhile(
    running: Running, fields: dict[str, Any], unknown: bytes, reason: str, field: str
) -> None:
    data = vllm_engine_pb2.GenerateRequest(**fields).SerializeToString() + unknown
    found = call(running, "vllm.grpc.engine.VllmEngine/Generate", data)
    assert found == ("INVALID_ARGUMENT", reason, [field])


def test_messages_in_messages_without_end_are_unreadable_or_have_no_input(running: Running) -> None:
    code, reason, _ = call(running, "GenerationService/Generate", nested(5000))
    assert (code, reason) in {("INTERNAL", "UNREADABLE_REQUEST"), ("INVALID_ARGUMENT", "MISSING_INPUT")}


def test_fields_that_nobody_knows_change_nothing(running: Running) -> None:
    message = generate(token_ids={"ids": [5, 6]}, max_new_tokens=2).SerializeToString()
    assert call(running, "GenerationService/Generate", message + b"\xfa\x7f\x03abc" * 1000) == ("OK", "", [])


def test_more_requests_than_may_wait_are_refused_at_once(running: Running) -> None:
    many = _pb.AddRequestsRequest(requests=[request_pb2.GenerationRequest()] * 2_000_000)
    assert call(running, "GenerationService/AddRequests", many)[:2] == ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE")


def test_ids_by_the_million_are_turned_into_text_while_health_answers(running: Running) -> None:
    message = text_service_pb2.DetokenizeRequest(token_ids=[5] * 10_000_000)
    assert call(running, "TextService/Detokenize", message)[0] == "OK"


def test_an_expression_that_gives_up_is_the_texts_fault_and_not_the_services(running: Running) -> None:
    refused = ("INVALID_ARGUMENT", "INVALID_VALUE")
    found = call(running, "GenerationService/Generate", generate(text=GIVES_UP))
    assert found == (*refused, ["request.text"])
    found = call(running, "TextService/Tokenize", text_service_pb2.TokenizeRequest(text=GIVES_UP))
    assert found == (*refused, ["text"])
    conversation = generate(chat={"messages": [{"role": "user", "content": GIVES_UP}]})
    found = call(running, "GenerationService/Generate", conversation)
    assert found == ("INVALID_ARGUMENT", "TEMPLATE_ERROR", ["request.chat"])


def test_a_short_text_that_takes_the_tokenizer_long_holds_up_nobody(running: Running) -> None:
    began = time.monotonic()
    call(running, "TextService/Tokenize", text_service_pb2.TokenizeRequest(text=TAKES_LONG))
    took = time.monotonic() - began
    assert took > 0.2, "then this test shows nothing"
    assert running.slowest[0] < max(0.5 * took, 1.0)


def test_a_tokenizer_that_is_too_large_is_refused_by_size(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.touch()
    os.truncate(file, 200_000_000)
    with pytest.raises(ValueError, match=f"it has 200000000 bytes, at most {MAX_FILE_BYTES} are read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[" * 100_000, '{"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}']
)
def test_a_tokenizer_that_is_none_is_an_error_of_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with contextlib.suppress(ValueError):
        Tokenizer.load(tmp_path)
        raise AssertionError("it was taken")
