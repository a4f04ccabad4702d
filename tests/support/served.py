"""A whole service around the fake worker, inside the test's event loop, with real gRPC over a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from chairlift.v1 import (
    admin_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    info_service_pb2_grpc,
    request_pb2,
    text_service_pb2_grpc,
)
from chairlift_service.addresses import UnixAddress
from chairlift_service.app import App, Signals, worker_factory
from chairlift_service.config import load
from chairlift_service.core import Core
from chairlift_service.workers.worker import Worker
from chairlift_worker.ipc.channel import DEFAULT_RING_BYTES
from chairlift_worker.ipc.status import Status
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc

from support.fake_worker import COMMAND
from support.tokenizer_files import byte_level

_pb = generation_service_pb2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """The running service and what a test needs to talk to it and to look inside."""

    core: Core
    app: App
    signals: Signals
    channel: grpc.aio.Channel
    admin_channel: grpc.aio.Channel
    target: str
    run: asyncio.Task[Any]

    @property
    def generation(self) -> Any:
        return generation_service_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        """With `admin=True` alone."""
        return admin_service_pb2_grpc.AdminServiceStub(self.admin_channel)

    @property
    def text(self) -> Any:
        return text_service_pb2_grpc.TextServiceStub(self.channel)

    @property
    def info(self) -> Any:
        return info_service_pb2_grpc.InfoServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    @property
    def tcp_target(self) -> str:
        """With `tcp=True` alone."""
        return str(self.app._entrance.addresses[1])

    @property
    def worker_pid(self) -> int:
        (pid,) = self.core.succession.pids
        return pid

    @property
    def worker(self) -> Worker:
        """The one there is."""
        worker = self.core.succession.worker
        assert worker is not None
        return worker

    @property
    def status(self) -> Status:
        """What it shows of itself now."""
        return self.worker.channel.status.read()

    async def idle(self) -> None:
        """Waits until nothing is live here and in the worker, and checks that nothing is left."""
        registry = self.core.registry
        await eventually(lambda: registry.num_live == 0 and len(self.core.readers) == 0)
        await eventually(lambda: (s := self.status).requests_waiting + s.requests_running == 0)
        admission = self.core.intake._admission
        assert (admission.num_requests, admission.num_tokens) == (0, 0)
        assert len(registry) == len(registry._kept)
        assert not self.worker.link._unsent
        steps = self.status.steps
        await asyncio.sleep(0.1)
        assert self.status.steps == steps


@contextlib.asynccontextmanager
async def serving(
    *,
    script: dict[str, object] | None = None,
    ring_bytes: int = DEFAULT_RING_BYTES,
    admin: bool = False,
    tcp: bool = False,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Runs the service until the end of the block, then drains it. `settings` are those of ServiceSettings."""
    with tempfile.TemporaryDirectory(prefix="cl") as folder, pytest.MonkeyPatch.context() as patch:
        byte_level().save(str(Path(folder) / "tokenizer.json"))
        patch.setenv("FAKE_WORKER", msgspec.json.encode({"tokenizer_dir": folder, **(script or {})}).decode())
        address = UnixAddress(f"{folder}/s")
        flags = ["--model", "fake", "--listen", str(address), "--drain-timeout", "1"]
        flags += ["--admin-listen", f"unix:{folder}/admin"] if admin else []
        flags += ["--listen", "127.0.0.1:0"] if tcp else []
        for name, value in settings.items():
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        configuration = load(flags, {})
        factory = dataclasses.replace(worker_factory(configuration, command=COMMAND), request_bytes=ring_bytes)
        core = Core.create(configuration, factory=factory)
        signals = Signals()
        app = App(core, signals=signals)
        run = asyncio.create_task(app.run())
        try:
            await eventually(lambda: core.main_health.serving or run.done(), timeout_s=30)
            if run.done():
                run.result()  # says why
            async with (
                grpc.aio.insecure_channel(str(address)) as grpc_channel,
                grpc.aio.insecure_channel(f"unix:{folder}/admin") as admin_channel,
            ):
                yield Served(
                    core=core,
                    app=app,
                    signals=signals,
                    channel=grpc_channel,
                    admin_channel=admin_channel,
                    target=str(address),
                    run=run,
                )
        finally:
            signals.first.set()
            await asyncio.gather(run, return_exceptions=True)
            await app.close()


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Waits until the condition holds; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def ids_request(*ids: int, max_new_tokens: int | None = 8, **fields: Any) -> request_pb2.GenerationRequest:
    """A request of token ids that does not stop at EOS."""
    fields.setdefault("stop", {"ignore_eos": True})
    return request_pb2.GenerationRequest(token_ids={"ids": ids}, max_new_tokens=max_new_tokens, **fields)


def generate(*ids: int, **fields: Any) -> _pb.GenerateRequest:
    """The same as a request of Generate."""
    return _pb.GenerateRequest(request=ids_request(*ids, **fields))


def echo(ids: list[int], count: int) -> list[int]:
    """What the fake worker answers."""
    return [ids[i % len(ids)] for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What a client sees of an error."""

    code: grpc.StatusCode
    reason: str
    message: str
    fields: tuple[str, ...]
    retry_s: float | None
    pushback_ms: str | None
    initial_metadata: tuple[tuple[str, str | bytes], ...]


async def rest(call: Any) -> list[Any]:
    """All messages of a stream that are still to come, by its reading interface, within 60 s."""
    messages = []
    async with asyncio.timeout(60):
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    return messages


async def refusal(call: Any) -> Refusal:
    """Reads a call to its end, which must be an error."""
    try:
        if hasattr(call, "read"):
            await rest(call)
        else:
            await asyncio.wait_for(call, 60)
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError("the call was not refused")


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """What the error tells."""
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    has_retry = False
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
        has_retry |= detail.Unpack(retry)
    assert not info.domain or info.domain == "chairlift"
    return Refusal(
        code=error.code(),
        reason=info.reason,
        message=error.details() or "",
        fields=tuple(violation.field for violation in bad.field_violations),
        retry_s=retry.retry_delay.ToMilliseconds() / 1000 if has_retry else None,
        pushback_ms=trailers.get("grpc-retry-pushback-ms"),
        initial_metadata=tuple(error.initial_metadata()),
    )


def num_fds() -> int:
    """Open descriptors of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))
