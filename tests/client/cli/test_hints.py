"""What commands say where gRPC itself failed, and so the service could not say why."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from chairlift_client.testing import FakeServer
from support.program import chairlift


def test_where_nobody_answers_the_address_and_its_origin_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"unix:{tmp_path}/nobody"
    done = chairlift("info", "--target", target)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"UNAVAILABLE: no service answers at {target} (from --target); is chairlift-serve there?" in done.stderr
    monkeypatch.setenv("CHAIRLIFT_TARGET", target)
    assert f"no service answers at {target} (from CHAIRLIFT_TARGET)" in chairlift("info").stderr
    monkeypatch.delenv("CHAIRLIFT_TARGET")
    error = json.loads(chairlift("info", "--json", "--target", target).stderr)
    assert error["status"] == "UNAVAILABLE"
    assert target in error["message"]


def test_an_operators_command_at_the_callers_address_names_the_other(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))  # as good as the callers' address: it has no AdminService
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    done = chairlift("pause", "--target", f"unix:{tmp_path}/s")
    server.stop(None).wait()
    assert done.returncode == 1
    assert "--admin-listen" in done.stderr


def test_a_deadline_that_passed_is_told_in_seconds(tmp_path: Path) -> None:
    with FakeServer(f"unix:{tmp_path}/s", token_delay=0.2) as server:
        done = chairlift("generate", "abc", "--max-new-tokens", "50", "--deadline", "0.5", "--target", server.target)
    assert done.returncode == 1
    assert "DEADLINE_EXCEEDED: the deadline of 0.5 s passed" in done.stderr


def test_a_message_over_grpcs_limit_names_both_limits(server: FakeServer) -> None:
    done = chairlift("generate", "-", "--target", server.target, stdin="a" * (16 * 2**20 + 1))
    assert done.returncode == 1
    assert "16777216 bytes here, --max-message-bytes at the service" in done.stderr


def test_no_message_is_wrong_use(server: FakeServer) -> None:
    done = chairlift("chat", "--target", server.target)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no message on standard input" in done.stderr


def test_the_version_is_told() -> None:
    done = chairlift("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("chairlift 0.")
