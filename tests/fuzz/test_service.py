"""Damaged messages on every call of a live service: a status of the contract's table each time, nobody is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest
from chairlift.v1 import generation_service_pb2, info_service_pb2, request_pb2, text_service_pb2
from chairlift_client import Client
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
from support.live_server import LiveServer, live_server
from support.mutation import MessageMutator, Mutator
from support.served import refusal_of
from support.tiny_models import generate_ids, tiny_model

_pb = generation_service_pb2
CODE = grpc.StatusCode
OF_THE_TABLE = {
    CODE.INVALID_ARGUMENT,
    CODE.ALREADY_EXISTS,
    CODE.NOT_FOUND,
    CODE.OUT_OF_RANGE,
    CODE.RESOURCE_EXHAUSTED,
    CODE.FAILED_PRECONDITION,
    CODE.ABORTED,
}
NUM_CALLERS = 8
MAX_READ = 20  # messages of a stream, before its caller leaves
MAX_GROWTH_BYTES = 64 * 2**20


def request(**fields: Any) -> request_pb2.GenerationRequest:
    return request_pb2.GenerationRequest(**{"max_new_tokens": 3, **fields})


REQUESTS = [
    request(text="the quick brown fox"),
    request(token_ids={"ids": [5, 6, 300, 7]}, request_id="a", session="s", priority=2, seed=7),
    request(token_ids={"ids": [9]}, sampling={"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}),
    request(
        token_ids={"ids": [9, 5, 9]},
        sampling={
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {7: 2.5},
            "no_repeat_ngram_size": 2,
            "banned_words": ["fox", "a b"],
            "banned_sequences": [{"ids": [5, 6]}],
        },
        stop={"min_new_tokens": 2},
        logprobs={"top_n": 5, "source": request_pb2.LOGPROB_SOURCE_RAW},
    ),
    # Without what might leave nothing to choose in the end, which is told as NUMERICAL_ERROR.
    request(token_ids={"ids": [9]}, sampling={"allowed_token_ids": range(5, 300), "banned_token_ids": [6]}),
    request(text="x", stop={"token_ids": [7, 8], "ignore_eos": True}, logprobs={"top_n": 1}, output={"text": True}),
    request(
        chat={
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "fields_json": '{"thinking": "x"}'},
            ],
            "tools_json": ['{"type": "function"}'],
            "template_arguments_json": {"x": "[1, {}]"},
        }
    ),
]
CHATS = [each.chat for each in REQUESTS if each.HasField("chat")]
METHODS: dict[str, list[Message]] = {
    "chairlift.v1.GenerationService/Generate": [_pb.GenerateRequest(request=each) for each in REQUESTS],
    "chairlift.v1.GenerationService/Complete": [_pb.CompleteRequest(request=each) for each in REQUESTS],
    "chairlift.v1.GenerationService/AddRequest": [_pb.AddRequestRequest(request=each) for each in REQUESTS],
    "chairlift.v1.GenerationService/AddRequests": [_pb.AddRequestsRequest(requests=REQUESTS[:3])],
    "chairlift.v1.GenerationService/Result": [
        _pb.ResultRequest(request_id="a", from_index=1),
        _pb.ResultRequest(session="s"),
    ],
    "chairlift.v1.GenerationService/Cancel": [_pb.CancelRequest(request_ids=["a", "b"], session="s")],
    "chairlift.v1.TextService/Tokenize": [text_service_pb2.TokenizeRequest(text="hello", add_special_tokens=False)],
    "chairlift.v1.TextService/Detokenize": [text_service_pb2.DetokenizeRequest(token_ids=[5, 300, 7])],
    "chairlift.v1.TextService/RenderChat": [text_service_pb2.RenderChatRequest(chat=chat) for chat in CHATS],
    "chairlift.v1.InfoService/GetModel": [info_service_pb2.GetModelRequest()],
    "chairlift.v1.InfoService/GetServer": [info_service_pb2.GetServerRequest()],
    "chairlift.v1.InfoService/WatchStats": [info_service_pb2.WatchStatsRequest(interval={"nanos": 50_000_000})],
    "vllm.grpc.engine.VllmEngine/Generate": [
        vllm_engine_pb2.GenerateRequest(tokenized={"input_ids": [5, 6, 300, 7]}, sampling_params=each, stream=True)
        for each in (
            {"max_tokens": 3, "temperature": 0.0, "top_p": 1.0, "n": 1, "logprobs": 1},
            {"max_tokens": 3, "temperature": 0.7, "seed": 5, "stop": ["a", "bc"], "stop_token_ids": [7]},
        )
    ],
    "vllm.grpc.engine.VllmEngine/Abort": [vllm_engine_pb2.AbortRequest(request_ids=["a", "b"])],
    "vllm.grpc.engine.VllmEngine/GetLoads": [vllm_engine_pb2.GetLoadsRequest(include=["core"])],
    "vllm.grpc.engine.VllmEngine/GetTokenizer": [common_pb2.GetTokenizerRequest()],
    "grpc.health.v1.Health/Check": [health_pb2.HealthCheckRequest(service="chairlift.v1.GenerationService")],
    "grpc.health.v1.Health/List": [health_pb2.HealthListRequest()],
    "grpc.health.v1.Health/Watch": [health_pb2.HealthCheckRequest()],
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": [
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="chairlift.v1.GenerationService")
    ],
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [
        reflection_pb2.ServerReflectionRequest(list_services="x")
    ],
}
STREAMS = ("/Generate", "/GetTokenizer", "/Result", "/WatchStats", "/Watch", "/ServerReflectionInfo")


@dataclass(frozen=True)
class UnexpectedError(Exception):
    """An outcome that the contract does not have; `data` brings it about."""

    method: str
    data: bytes
    outcome: str


async def call(channel: grpc.aio.Channel, method: str, data: bytes) -> str:
    """Sends the bytes; returns how it ended. Raises UnexpectedError."""
    try:
        if method.endswith("/ServerReflectionInfo"):
            await _read(channel.stream_stream(f"/{method}")(iter([data]), timeout=30))
        elif method.endswith(STREAMS):
            await _read(channel.unary_stream(f"/{method}")(data, timeout=30))
        else:
            await channel.unary_unary(f"/{method}")(data, timeout=30)
    except grpc.aio.AioRpcError as error:
        told = refusal_of(error)
        unreadable = (told.code, told.reason) == (CODE.INTERNAL, "UNREADABLE_REQUEST")
        of_health = method.startswith("grpc.health") and told.code is CODE.NOT_FOUND
        if not (unreadable or of_health or (told.code in OF_THE_TABLE and told.reason)):
            raise UnexpectedError(method, data, f"{told.code.name} {told.reason}: {told.message}") from error
        if told.initial_metadata and told.code is not CODE.ABORTED:
            raise UnexpectedError(method, data, f"{told.code.name} after initial metadata") from error
        return f"{told.code.name} {told.reason}"
    return "OK"


async def _read(stream: Any) -> None:
    """Some messages of a stream, as many as come soon; then its caller leaves."""
    for _ in range(MAX_READ):
        message = asyncio.ensure_future(stream.read())
        await asyncio.wait([message], timeout=0.1)
        if not message.done():
            stream.cancel()
            await asyncio.wait([message])
            return
        if message.result() is grpc.aio.EOF:
            return
    stream.cancel()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("fuzz") / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with tempfile.TemporaryDirectory(prefix="cl-") as short:
        args = ("--result-ttl", "1", "--num-blocks", "64", "--metrics-listen", f"unix:{short}/m")
        with live_server(folder, "--dtype", "float32", *args) as running:
            yield running


def memory_bytes(server: LiveServer) -> int:
    service = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in (service, *service.children(recursive=True)))


async def fuzz(server: LiveServer, *, seed: int, seconds: float) -> tuple[Counter[str], int]:
    """Callers that send damaged messages, each its own; the outcomes, and how memory grew after the first half."""
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    middle: list[int] = []

    async def caller(number: int, channel: grpc.aio.Channel) -> None:
        sources = {method: MessageMutator(valid, seed=seed * NUM_CALLERS + number) for method, valid in METHODS.items()}
        while (elapsed := time.monotonic() - began) < seconds:
            for method, source in sources.items():
                outcomes[f"{method.partition('/')[2]} {await call(channel, method, source.one())}"] += 1
            if number == 0 and not middle and elapsed > seconds / 2:
                middle.append(memory_bytes(server))

    async with grpc.aio.insecure_channel(server.target) as channel, asyncio.TaskGroup() as group:
        for number in range(NUM_CALLERS):
            group.create_task(caller(number, channel))
    return outcomes, memory_bytes(server) - middle[0] if middle else 0


def test_damaged_messages_get_statuses_of_the_table_and_harm_nobody(server, share_s: float, seed: int) -> None:
    family = processes(server)
    outcomes, growth = asyncio.run(fuzz(server, seed=seed, seconds=share_s))
    print(f"{sum(outcomes.values())} calls:", *sorted(outcomes.items()), sep="\n  ")
    assert growth < MAX_GROWTH_BYTES
    expect_unharmed(server, family)
    assert len(outcomes) > 20


FRAMES = {  # of HTTP/2, by RFC 9113: type, flags, stream, payload
    "settings of the largest values": (4, 0, 0, struct.pack(">HI", 4, 0xFFFFFFFF) + struct.pack(">HI", 5, 0xFFFFFFFF)),
    "data on a stream that is none": (0, 1, 7, b"\0\0\0\0\1x"),
    "a message longer than its frame": (0, 1, 1, b"\0\xff\xff\xff\xff"),
    "headers that do not end": (1, 0, 1, b"\x82" * 100),
    "headers that are no HPACK": (1, 5, 1, b"\xff" * 200),
    "a table size of gigabytes": (1, 5, 1, b"\x3f" + b"\xff" * 4 + b"\x0f"),
    "a path with commands for a terminal": (
        1,
        5,
        1,
        b"\x83\x86\x04\x2e/chairlift.v1.AdminService/\x1b]0;owned\x07\n2026 [info] x",
    ),
    "continuation of nothing": (9, 4, 1, b"x"),
    "a window past its end": (8, 0, 0, struct.pack(">I", 0x7FFFFFFF)),
    "ping": (6, 0, 0, bytes(8)),
    "reset of everything": (3, 0, 1, bytes(4)),
    "a type that nobody knows": (200, 255, 2**31 - 1, b"x" * 99),
}
HTTP_REQUESTS = [
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\r\nAccept: ;;;q=x, text/plain; version=\r\n\r\n",
    b"POST / HTTP/1.0\r\nContent-Length: -1\r\n\r\nx",
    b"GET /metrics\0\x1b[2J HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


def frames(noise: random.Random) -> Iterator[bytes]:
    """Connections' worth of frames: known bad ones and others, in any order, and cut anywhere."""
    while True:
        data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" * (noise.random() < 0.9)
        for kind, flags, stream, payload in noise.choices(list(FRAMES.values()), k=noise.randrange(1, 8)):
            length = len(payload) if noise.random() < 0.9 else noise.randrange(2**24)
            data += length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
        yield data if noise.random() < 0.7 else data[: noise.randrange(len(data))]


def talk(path: str, data: bytes) -> bytes:
    """Sends it on a connection of its own; what came back within a moment."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.settimeout(0.05)
        connection.connect(path)
        connection.sendall(data)
        return connection.recv(65536)
    return b""


def test_bytes_that_are_no_protocol_harm_nobody(server: LiveServer, share_s: float, seed: int) -> None:
    family, noise = processes(server), random.Random(seed)
    http = Mutator(HTTP_REQUESTS, seed=seed)
    (metrics,) = re.findall(r'"address": "unix:([^"]+/m)"', server.log())
    end, answers = time.monotonic() + share_s / 2, 0
    for data in frames(noise):
        talk(server.target.removeprefix("unix:"), data)
        answer = talk(metrics, http.one())
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer
        answers += bool(answer)
        if time.monotonic() > end:
            break
    assert answers > 10
    assert talk(metrics, HTTP_REQUESTS[0]).startswith(b"HTTP/1.1 200 ")
    expect_unharmed(server, family)
    log = server.log()
    assert "owned" not in log
    assert "Traceback" not in log


def processes(server: LiveServer) -> list[int]:
    return [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children())]


def expect_unharmed(server: LiveServer, family: list[int]) -> None:
    """The processes are those from before, answers are right, and nothing went wrong that nobody was told."""
    assert all(psutil.pid_exists(pid) for pid in family)
    with Client(server.target) as client:
        client.cancel(session="s")
        ids = [5, 6, 7]
        answer = client.complete(ids, max_new_tokens=8, temperature=0.0, ignore_eos=True, timeout=60)
        assert answer.token_ids == tuple(generate_ids(tiny_model("llama"), ids, 8).ids)
    assert [line for line in server.log().splitlines() if '"level": "error"' in line] == []
