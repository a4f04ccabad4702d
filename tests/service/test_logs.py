"""What the log of a service says of requests, and what it never says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import grpc
from chairlift.v1 import generation_service_pb2, generation_service_pb2_grpc, request_pb2, text_service_pb2
from chairlift.v1 import text_service_pb2_grpc as text_grpc
from support.fake_worker import ERROR_TOKEN
from support.serve_fake import COMMAND_LINE
from support.served import refusal, rest
from support.tokenizer_files import byte_level

_pb = generation_service_pb2
SECRET = "the queen's jewels are under the third stair"


def request(name: str, **fields: Any) -> _pb.GenerateRequest:
    return _pb.GenerateRequest(request=request_pb2.GenerationRequest(request_id=name, **fields))


async def talk(channel: grpc.aio.Channel) -> None:
    """Calls that go well, and calls that fail in every place, all with the secret in them."""
    generation: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
    await rest(generation.Generate(request("good", text=SECRET, max_new_tokens=60)))
    left = generation.Generate(request("left", text=SECRET, max_new_tokens=900))
    await left.read()
    left.cancel()
    failing: dict[str, dict[str, Any]] = {
        "too-long": {"text": SECRET * 100},
        "bad-value": {"text": SECRET, "sampling": {"temperature": -1}},
        "no-template": {"chat": {"messages": [{"role": "user", "content": SECRET}]}},
        "computation": {"token_ids": {"ids": [ERROR_TOKEN, *SECRET.encode()]}, "max_new_tokens": 9},
    }
    for name, fields in failing.items():
        await refusal(generation.Generate(request(name, **fields)))
    await refusal(generation.Result(_pb.ResultRequest(request_id="nobody")))
    text: Any = text_grpc.TextServiceStub(channel)
    await text.Tokenize(text_service_pb2.TokenizeRequest(text=SECRET))


async def log_of_a_talk() -> str:
    with tempfile.TemporaryDirectory(prefix="cl") as folder:
        byte_level().save(str(Path(folder) / "tokenizer.json"))
        process = await asyncio.create_subprocess_exec(
            *COMMAND_LINE,
            *("--model", "fake", "--listen", f"unix:{folder}/s", "--log-level", "debug", "--log-format", "json"),
            env={**os.environ, "FAKE_WORKER": json.dumps({"tokenizer_dir": folder})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), 30)
        async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
            await talk(channel)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        return errors.decode()


async def test_every_line_of_a_request_has_its_id_and_no_line_has_a_prompt() -> None:
    log = await log_of_a_talk()
    lines = [json.loads(line) for line in log.splitlines()]
    by_id: dict[str, list[str]] = {}
    for line in lines:
        if "request_id" in line:
            by_id.setdefault(line["request_id"], []).append(line["event"])
    assert by_id["good"] == ["request ended"]
    assert "request ended" in by_id["left"]
    for name in ("too-long", "bad-value", "no-template", "nobody"):
        assert by_id[name] == ["call refused or failed"], name
    assert by_id["computation"] == ["request ended", "call refused or failed"]
    about_requests = [line for line in lines if "call" in line["event"] or "request" in line["event"]]
    assert all("request_id" in line for line in about_requests)
    for trace in (SECRET, "jewels", ", ".join(map(str, SECRET.encode()[:6]))):
        assert trace not in log
