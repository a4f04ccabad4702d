"""Log injection: whatever callers and model files write, a record stays one line and a terminal gets no commands."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from chairlift.v1 import generation_service_pb2, generation_service_pb2_grpc, request_pb2
from chairlift_worker.ipc.logs import for_terminal
from support.serve_fake import COMMAND_LINE
from support.served import refusal, rest
from support.tokenizer_files import byte_level

_pb = generation_service_pb2
FORGED = "2026-01-01T00:00:00.000000Z [info     ] everything is fine"
HOSTILE = {
    "line feed": f"x\n{FORGED}",
    "carriage return": f"x\r{FORGED}",
    "next line": f"x\x85{FORGED}",
    "line separator": f"x\u2028{FORGED}",
    "paragraph separator": f"x\u2029{FORGED}",
    "vertical tab, form feed": f"x\v\f{FORGED}",
    "title of a terminal": "x\x1b]0;owned\x07",
    "clearing a terminal": "x\x1b[2J\x1b[H",
    "control sequence of 8 bits": "x\x9b2J",
    "NUL, backspaces": "x\0\b\b\b",
    "right to left": "x\u202egnp.exe",
    "half a pair": "x\ud800",
}
OWN_COLOURS = re.compile(r"\x1b\[\d+m")
RECORD = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[(debug|info|warning|error) *\] ")
PROGRAM = """
import json, logging, sys
import structlog
from chairlift_worker.ipc.logs import setup_logging
setup_logging(log_format=sys.argv[1])
log, plain = structlog.get_logger("a"), logging.getLogger("b")
for text in json.loads(sys.argv[2]):
    log.info(text, value=text, several=[text], **{text: 1})
    plain.warning("%s", text)
    for failed in (log.exception, plain.exception):
        try:
            raise ValueError(text)
        except ValueError:
            failed("it failed")
"""


def lines_of(output: bytes) -> list[str]:
    """Lines as a reader of the file sees them that knows every line end there is."""
    text = OWN_COLOURS.sub("", output.decode())
    assert all(c.isprintable() or c == "\n" for c in text)
    return text.splitlines()


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_a_record_is_one_line(log_format: str) -> None:
    command = [sys.executable, "-c", PROGRAM, log_format, json.dumps(list(HOSTILE.values()))]
    lines = lines_of(subprocess.run(command, capture_output=True, check=True, timeout=60).stderr)
    if log_format == "json":
        records = [json.loads(line) for line in lines]
        assert len(records) == 4 * len(HOSTILE)
        for text, record in zip(HOSTILE.values(), records[::4], strict=True):
            assert record["event"] == record["value"] == text  # nothing is lost
    else:
        starts = [line for line in lines if RECORD.match(line)]
        assert len(starts) == 4 * len(HOSTILE)
        assert all(line in starts or line.startswith("  | ") for line in lines)


def test_what_libraries_log_is_one_record_each() -> None:
    program = """
import json, sys
from chairlift_worker.ipc.logs import adopt_libraries, setup_logging
setup_logging(log_format="json")
from huggingface_hub.utils import logging as of_the_hub
from transformers.utils import logging as of_transformers
adopt_libraries()
for text in json.loads(sys.argv[1]):
    of_transformers.get_logger("transformers.models.any").warning(text)
    of_the_hub.get_logger("huggingface_hub.any").warning(text)
"""
    command = [sys.executable, "-c", program, json.dumps(list(HOSTILE.values()))]
    lines = lines_of(subprocess.run(command, capture_output=True, check=True, timeout=60).stderr)
    assert [json.loads(line)["event"] for line in lines] == [text for text in HOSTILE.values() for _ in range(2)]


@pytest.mark.parametrize("text", ["", "plain text", "příliš žluťoučký 東京 🚀"])
def test_what_is_printable_stays_as_it_is(text: str) -> None:
    assert for_terminal(text) == text


def test_what_is_not_is_spelt_out() -> None:
    assert for_terminal("a\n\x1b\u2028\ud800b") == r"a\n\x1b\u2028\ud800b"


async def hostile_calls(channel: grpc.aio.Channel) -> None:
    """Everything that a caller can name, in every place where it may reach the log."""
    stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
    for text in (text for name, text in HOSTILE.items() if name != "half a pair"):  # which no message can hold
        ids = {"ids": [5]}
        named = request_pb2.GenerationRequest(request_id=text, session=text, token_ids=ids, max_new_tokens=2)
        await refusal(stub.Generate(_pb.GenerateRequest(request=named)))
        await refusal(stub.AddRequest(_pb.AddRequestRequest(request=named)))
        await refusal(stub.Result(_pb.ResultRequest(request_id=text)))
        await refusal(stub.Result(_pb.ResultRequest(session=text)))
        await stub.Cancel(_pb.CancelRequest(request_ids=[text], session=text))
        arguments = {"messages": [{"role": text, "content": text}], "template": text}
        chat = request_pb2.GenerationRequest(chat={**arguments, "template_arguments_json": {text: text}})
        await refusal(stub.Generate(_pb.GenerateRequest(request=chat)))
        metadata = (("x-any-bin", text.encode()), ("traceparent", "00-" + "a" * 32), ("x-any", "e\\x1b]0;"))
        good = request_pb2.GenerationRequest(token_ids=ids, max_new_tokens=2)
        await rest(stub.Generate(_pb.GenerateRequest(request=good), metadata=metadata))


@pytest.mark.parametrize("log_format", ["human", "json"])
async def test_no_caller_writes_lines_of_the_services_log(log_format: str) -> None:
    with tempfile.TemporaryDirectory(prefix="cl") as folder:
        byte_level().save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
        process = await asyncio.create_subprocess_exec(
            *COMMAND_LINE,
            *("--model", "fake", "--listen", f"unix:{folder}/s", "--log-level", "debug", "--log-format", log_format),
            env={**os.environ, "FAKE_WORKER": json.dumps({"tokenizer_dir": folder})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), 60)
        async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
            await hostile_calls(channel)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    lines = lines_of(errors)
    assert len(lines) > 5 * len(HOSTILE)
    for line in lines:
        assert RECORD.match(line) if log_format == "human" else isinstance(json.loads(line), dict), line
        assert not line.startswith(FORGED)


def test_the_line_that_says_why_it_could_not_start_is_one_line(tmp_path: Path) -> None:
    """Names of tensors, which are in it, come from a model's files."""
    names = "".join(HOSTILE.values()).replace("\ud800", "")  # which no message of the worker can hold
    script = {"fail_start": f"model = x: tensors missing in its files: {names}"}
    done = subprocess.run(
        [*COMMAND_LINE, "--model", "fake", "--listen", f"unix:{tmp_path}/s", "--log-level", "error"],
        env={**os.environ, "FAKE_WORKER": json.dumps(script)},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    (line,) = lines_of(done.stderr)
    assert line.startswith("chairlift-serve: model = x: tensors missing in its files: x")
