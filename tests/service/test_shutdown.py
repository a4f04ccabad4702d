"""The program from outside: what it prints, how it ends, what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from chairlift.v1 import generation_service_pb2_grpc, info_service_pb2, info_service_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.serve_fake import COMMAND_LINE
from support.served import eventually, generate, refusal, rest
from support.tokenizer_files import byte_level

LONG = 1000


class Program:
    """A running `chairlift-serve` with the fake worker."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 30)).decode()

    async def end(self, timeout_s: float = 10) -> tuple[int, str, list[str]]:
        """Exit code, rest of standard output, lines of standard error."""
        out, err = await asyncio.wait_for(self.process.communicate(), timeout_s)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode().splitlines()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def program(*flags: str, script: dict[str, object] | None = None) -> AsyncIterator[Program]:
    with tempfile.TemporaryDirectory(prefix="cl") as name:
        folder = Path(name)
        byte_level().save(str(folder / "tokenizer.json"))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CHAIRLIFT_")}
        environment["FAKE_WORKER"] = json.dumps({"tokenizer_dir": name, **(script or {})})
        process = await asyncio.create_subprocess_exec(
            *COMMAND_LINE,
            *("--model", "fake", *flags),
            cwd=name,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            yield Program(process, folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def worker_of(channel: grpc.aio.Channel) -> psutil.Process:
    info = info_service_pb2_grpc.InfoServiceStub(channel)
    (pid,) = (await info.GetServer(info_service_pb2.GetServerRequest())).worker_pids
    return psutil.Process(pid)


async def gone(process: psutil.Process, within_s: float) -> None:
    await eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, timeout_s=within_s)


def stub(channel: grpc.aio.Channel) -> Any:
    return generation_service_pb2_grpc.GenerationServiceStub(channel)


async def test_it_prints_one_line_with_real_addresses_and_drains_to_exit_code_0() -> None:
    flags = ["--listen", "127.0.0.1:0", "--listen", "unix:s", "--drain-timeout", "20"]
    async with program(*flags, script={"step_s": 0.01}) as running:
        line = await running.line()
        assert line.startswith("chairlift: serving fake on 127.0.0.1:")
        assert line.endswith(", unix:s\n")
        tcp = line.removeprefix("chairlift: serving fake on ").split(",")[0]
        assert not tcp.endswith(":0")
        path = running.folder / "s"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(tcp) as first, grpc.aio.insecure_channel(f"unix:{path}") as second:
            calls = [stub(channel).Generate(generate(5, max_new_tokens=100)) for channel in (first, second, second)]
            for call in calls:
                await call.read()
            watch = health_pb2_grpc.HealthStub(first).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            running.send(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            refused = await refusal(stub(second).Generate(generate(5)))
            assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DRAINING")
            for call in calls:
                assert (await rest(call))[-1].finished.usage.generated_tokens == 100
        code, out, _ = await running.end()
        assert (code, out) == (0, "")
        assert not path.exists()


async def test_what_does_not_end_within_the_drain_timeout_gets_unavailable() -> None:
    async with program("--listen", "unix:s", "--drain-timeout", "0.3", script={"step_s": 0.02}) as running:
        await running.line()
        async with grpc.aio.insecure_channel(f"unix:{running.folder}/s") as channel:
            call = stub(channel).Generate(generate(5, max_new_tokens=LONG))
            await call.read()
            running.send(signal.SIGTERM)
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
            assert refused.retry_s == 1.0
        assert (await running.end())[0] == 0


async def test_a_second_signal_ends_at_once() -> None:
    async with program("--listen", "unix:s", "--drain-timeout", "60", script={"step_s": 0.02}) as running:
        await running.line()
        async with grpc.aio.insecure_channel(f"unix:{running.folder}/s") as channel:
            worker = await worker_of(channel)
            call = stub(channel).Generate(generate(5, max_new_tokens=LONG))
            await call.read()
            running.send(signal.SIGINT)
            await asyncio.sleep(0.3)
            assert running.process.returncode is None
            running.send(signal.SIGINT)
            began = time.monotonic()
            assert (await running.end())[0] == 1
            assert time.monotonic() - began < 2
        await gone(worker, 1)
        assert not (running.folder / "s").exists()


async def test_a_killed_worker_that_is_not_to_be_replaced_ends_every_call_at_once_and_the_service_with_it() -> None:
    async with program(
        "--listen", "unix:s", "--worker-restart-limit", "0", script={"step_s": 0.02, "max_running": 2}
    ) as running:
        await running.line()
        async with grpc.aio.insecure_channel(f"unix:{running.folder}/s") as channel:
            worker = await worker_of(channel)
            calls = [stub(channel).Generate(generate(5, max_new_tokens=LONG)) for _ in range(4)]
            await asyncio.gather(*(call.initial_metadata() for call in calls))
            await calls[0].read()
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            worker.kill()
            began = time.monotonic()
            for call in calls:
                refused = await refusal(call)
                assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
                assert refused.retry_s == 1.0
            assert time.monotonic() - began < 1
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        code, _, errors = await running.end()
        assert code == 1
        assert errors[-1] == "chairlift-serve: worker lost: signal SIGKILL"


async def test_a_killed_service_takes_its_worker_along() -> None:
    async with program("--listen", "unix:s") as running:
        await running.line()
        async with grpc.aio.insecure_channel(f"unix:{running.folder}/s") as channel:
            worker = await worker_of(channel)
        running.send(signal.SIGKILL)
        await gone(worker, 5)
        async with program("--listen", f"unix:{running.folder}/s") as again:  # the stale socket is no obstacle
            assert await again.line() == f"chairlift: serving fake on unix:{running.folder}/s\n"


async def test_the_terminal_s_interrupt_reaches_the_service_only() -> None:
    async with program("--listen", "unix:s") as running:
        await running.line()
        async with grpc.aio.insecure_channel(f"unix:{running.folder}/s") as channel:
            worker = await worker_of(channel)
        assert os.getsid(worker.pid) == worker.pid != os.getsid(running.process.pid)
        assert worker.num_fds() < 20


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ({"fail_start": "num_blocks = 1: too few\nfor anything"}, "num_blocks = 1: too few for anything"),
        ({"crash_start": True}, "worker: ended with exit code 3 before it could serve"),
        ({"tokenizer_dir": "nowhere"}, "cannot read the tokenizer nowhere/tokenizer.json: No such file or directory"),
    ],
)
async def test_a_worker_that_cannot_start_is_reported_in_one_line(script: dict[str, object], line: str) -> None:
    async with program("--listen", "unix:s", script=script) as running:
        code, out, errors = await running.end(timeout_s=15)
        assert (code, out) == (1, "")
        assert [error for error in errors if error.startswith("chairlift-serve:")] == [errors[-1]]
        assert errors[-1] == f"chairlift-serve: {line}"
        assert not (running.folder / "s").exists()


async def test_a_worker_that_takes_too_long_is_given_up() -> None:
    async with program("--listen", "unix:s", "--start-timeout", "0.5", script={"start_s": 60}) as running:
        code, _, errors = await running.end(timeout_s=15)
        assert code == 1
        assert errors[-1] == "chairlift-serve: worker: not ready within start_timeout = 0.5 s"


async def test_health_answers_while_the_model_is_loaded_and_a_signal_then_ends_it_well() -> None:
    async with program("--listen", "unix:s", script={"start_s": 60}) as running:
        await eventually((running.folder / "s").exists, timeout_s=15)
        async with grpc.aio.insecure_channel(f"unix:{running.folder}/s") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=10
            )
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            refused = await refusal(stub(channel).Generate(generate(5)))
            assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
            worker = await worker_of(channel)
        running.send(signal.SIGTERM)
        assert (await running.end())[:2] == (0, "")
        await gone(worker, 1)


async def test_a_socket_on_which_somebody_listens_is_not_taken() -> None:
    with tempfile.TemporaryDirectory(prefix="cl") as folder, socket.socket(socket.AF_UNIX) as other:
        path = f"{folder}/taken"
        other.bind(path)
        other.listen()
        async with program("--listen", f"unix:{path}") as running:
            code, _, errors = await running.end(timeout_s=15)
        assert (code, errors) == (1, [f"chairlift-serve: listen = unix:{path}: another process listens there"])
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)  # still there


async def test_a_port_or_file_that_is_taken_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for address, why in (
            (f"127.0.0.1:{port}", "Address already in use"),
            (f"unix:{tmp_path}/file", "the file exists and is no socket"),
            (f"unix:{tmp_path}/no/such", f"cannot be bound: {tmp_path}/no is no folder"),
        ):
            async with program("--listen", address) as running:
                code, _, errors = await running.end(timeout_s=15)
            assert (code, errors) == (1, [f"chairlift-serve: listen = {address}: {why}"])
        async with program("--listen", f"unix:{tmp_path}/s", "--admin-listen", address) as running:
            code, _, errors = await running.end(timeout_s=15)
        assert (code, errors) == (1, [f"chairlift-serve: admin_listen = {address}: {why}"])
    assert (tmp_path / "file").read_text() == "mine"


def test_a_bad_setting_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run(
        [*COMMAND_LINE, "--model", "fake", "--drain-timeout", "soon"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "drain_timeout" in done.stderr
    assert "soon" in done.stderr


def test_print_config_prints_and_ends() -> None:
    done = subprocess.run(
        [*COMMAND_LINE, "--model", "fake", "--print-config"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "drain_timeout" in done.stdout
