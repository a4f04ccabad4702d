"""Starts the worker, learns whether it can serve, and notices when it no longer does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import structlog
from chairlift_worker.ipc.channel import ServiceChannel
from chairlift_worker.ipc.messages import ReadyMsg, StartFailedMsg
from chairlift_worker.ipc.status import Phase, Status

from chairlift_service.child_process import ChildProcess, describe_exit
from chairlift_service.workers.link import Link

WATCH_PERIOD_S: Final = 1.0
"""How often the heartbeat is looked at."""

STUCK_PER_TOKEN_S: Final = 0.25
"""A step that computes T tokens is stuck after step_timeout + T * STUCK_PER_TOKEN_S without a heartbeat: some
hundred times what a slow processor needs, so that a machine under load is not taken for a stuck worker."""

BURIAL_S: Final = 10.0
"""How long a killed worker may take to be gone: it has gigabytes to give back."""

_NS_PER_S: Final = 1_000_000_000

_log = structlog.get_logger(__name__)


class WorkerStartError(Exception):
    """The worker cannot start. The text is one line."""


class Supervisor:
    """One worker process from its start to its end.

    `lost` is set, in words, when a worker that was ready is over or has to be given up; it has been killed by then.
    """

    def __init__(
        self, *, channel: ServiceChannel, link: Link, argv: Sequence[str], start_timeout_s: float, step_timeout_s: float
    ) -> None:
        self._channel = channel
        self._link = link
        self._argv = argv
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._process: ChildProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the worker; empty if there is none."""
        if self._process is None or self._process.exited.done():
            return ()
        return (self._process.pid,)

    async def start(self) -> ReadyMsg:
        """Starts the worker and waits until it can serve. Raises WorkerStartError; the worker is dead then."""
        try:
            process = ChildProcess(argv=self._argv, pass_fds=self._channel.worker_fds)
        except OSError as error:
            raise WorkerStartError(f"worker: cannot be started: {error}") from error
        self._process = process
        _log.info("worker started", pid=process.pid)
        try:
            ready = await self._first_message(process)
        except BaseException:
            if self._link.hello.done():  # it has said why, and ends by itself
                await process.end(patience_s=BURIAL_S)
            process.kill()
            raise
        self._watch = asyncio.create_task(self._watch_over(process), name="worker watch")
        return ready

    async def stop(self, *, patience_s: float) -> None:
        """Ends the worker: asks it to, and kills it if it does not within `patience_s`. It is reaped afterwards."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is None:
            return
        asked = self._link.shutdown()
        code = await self._process.end(patience_s=patience_s if asked else 0.0)
        _log.info("worker ended", pid=self._process.pid, how=describe_exit(code))

    async def _first_message(self, process: ChildProcess) -> ReadyMsg:
        """What the worker says first, unless it ends before that."""
        hello, broken = self._link.hello, self._link.broken
        await asyncio.wait(
            (hello, broken, process.exited), timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if process.exited.done():
            self._link.receive_rest()
        if hello.done():
            message = hello.result()
            if isinstance(message, StartFailedMsg):
                raise WorkerStartError(" ".join(message.message.split()))
            return message
        if process.exited.done():
            how = describe_exit(process.exited.result())
            raise WorkerStartError(f"worker: ended with {how} before it could serve")
        if broken.done():
            raise WorkerStartError(f"worker: {broken.result()}")
        raise WorkerStartError(f"worker: not ready within start_timeout = {self._start_timeout_s:g} s")

    async def _watch_over(self, process: ChildProcess) -> None:
        """Waits for the worker's end, and brings it about if the worker is stuck or talks nonsense."""
        while True:
            await asyncio.wait(
                (process.exited, self._link.broken), timeout=WATCH_PERIOD_S, return_when=asyncio.FIRST_COMPLETED
            )
            if process.exited.done():
                why = describe_exit(process.exited.result())
                break
            if self._link.broken.done():
                why = self._link.broken.result()
                break
            silent_s = self._silence()
            if silent_s is not None:
                why = f"stuck: no sign of life for {silent_s:.0f} s"
                break
        process.kill()
        await asyncio.wait((process.exited,), timeout=BURIAL_S)
        self._link.receive_rest()  # what it sent before it ended still counts
        _log.error("worker lost", pid=process.pid, why=why)
        self.lost.set_result(why)

    def _silence(self) -> float | None:
        return stuck_for(self._channel.status.read(), now_ns=time.monotonic_ns(), step_timeout_s=self._step_timeout_s)


def stuck_for(status: Status, *, now_ns: int, step_timeout_s: float) -> float | None:
    """For how many seconds a worker has given no sign of life, if that is too long; else None.

    Bounded while it serves, or is paused; how long loading and warming may take is the start time-out's matter.
    """
    if status.phase not in (Phase.IDLE, Phase.RUNNING, Phase.PAUSED) or not status.heartbeat_ns:
        return None
    silent_s = (now_ns - status.heartbeat_ns) / _NS_PER_S
    return silent_s if silent_s > step_timeout_s + status.planned_tokens * STUCK_PER_TOKEN_S else None
