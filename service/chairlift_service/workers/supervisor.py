"""Starts the worker, learns whether it can serve, and notices when it no longer does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import structlog
from chairlift_worker.ipc.messages import ReadyMsg, StartFailedMsg
from chairlift_worker.ipc.status import Phase, Status

from chairlift_service.workers.link import Link
from chairlift_service.workers.ranks import RankLaunch, RankProcesses

WATCH_PERIOD_S: Final = 1.0
"""How often the heartbeat is looked at."""

STUCK_PER_TOKEN_S: Final = 0.25
"""A step that computes T tokens is stuck after step_timeout + T * STUCK_PER_TOKEN_S without a heartbeat: some
hundred times what a slow processor needs, so that a machine under load is not taken for a stuck worker."""

BURIAL_S: Final = 10.0
"""How long a killed worker may take to be gone: it has gigabytes to give back."""

SAY_WHY_S: Final = 5.0
"""How long rank 0 may take to say why the worker does not start, once another rank has ended."""

_NS_PER_S: Final = 1_000_000_000

_log = structlog.get_logger(__name__)


class WorkerStartError(Exception):
    """The worker cannot start. The text is one line."""


class Supervisor:
    """One worker, all of its processes, from its start to its end.

    `lost` is set, in words, when a worker that was ready is over or has to be given up; it has been killed by then.
    The loss of one rank is that of the worker.
    """

    def __init__(
        self, *, link: Link, launches: Sequence[RankLaunch], start_timeout_s: float, step_timeout_s: float
    ) -> None:
        self._link = link
        self._launches = launches
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._ranks: RankProcesses | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the worker, by rank; empty if there is none."""
        return () if self._ranks is None else self._ranks.pids

    async def start(self) -> ReadyMsg:
        """Starts the worker and waits until it can serve. Raises WorkerStartError; the worker is dead then."""
        try:
            ranks = RankProcesses(self._launches)
        except OSError as error:
            raise WorkerStartError(f"worker: cannot be started: {error}") from error
        self._ranks = ranks
        _log.info("worker started", pid=ranks.pids)
        try:
            ready = await self._first_message(ranks)
        except BaseException:
            if self._link.hello.done():  # it has said why, and ends by itself
                await ranks.end(patience_s=BURIAL_S)
            ranks.kill()
            raise
        self._watch = asyncio.create_task(self._watch_over(ranks), name="worker watch")
        return ready

    async def stop(self, *, patience_s: float) -> None:
        """Ends the worker: asks it to, and kills it if it does not within `patience_s`. It is reaped afterwards."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._ranks is None:
            return
        pids = self._ranks.pids
        asked = self._link.shutdown()
        how = await self._ranks.end(patience_s=patience_s if asked else 0.0)
        _log.info("worker ended", pid=pids, how=how)

    async def _first_message(self, ranks: RankProcesses) -> ReadyMsg:
        """What the worker says first, unless it ends before that."""
        hello, broken = self._link.hello, self._link.broken
        await asyncio.wait(
            (hello, broken, ranks.first_exit), timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if ranks.first_exit.done():
            await asyncio.wait((hello, ranks.leader_exited), timeout=SAY_WHY_S, return_when=asyncio.FIRST_COMPLETED)
            self._link.receive_rest()
        if hello.done():
            message = hello.result()
            if isinstance(message, StartFailedMsg):
                raise WorkerStartError(" ".join(message.message.split()))
            return message
        if ranks.first_exit.done():
            raise WorkerStartError(f"worker: ended with {ranks.first_exit.result()} before it could serve")
        if broken.done():
            raise WorkerStartError(f"worker: {broken.result()}")
        raise WorkerStartError(f"worker: not ready within start_timeout = {self._start_timeout_s:g} s")

    async def _watch_over(self, ranks: RankProcesses) -> None:
        """Waits for the worker's end, and brings it about if the worker is stuck or talks nonsense."""
        while True:
            await asyncio.wait(
                (ranks.first_exit, self._link.broken), timeout=WATCH_PERIOD_S, return_when=asyncio.FIRST_COMPLETED
            )
            if ranks.first_exit.done():
                why = ranks.first_exit.result()
                break
            if self._link.broken.done():
                why = self._link.broken.result()
                break
            stuck = self._find_stuck(ranks)
            if stuck is not None:
                why = stuck
                break
        pids = ranks.pids
        ranks.kill()
        await ranks.gone(timeout_s=BURIAL_S)
        self._link.receive_rest()  # what it sent before it ended still counts
        _log.error("worker lost", pid=pids, why=why)
        self.lost.set_result(why)

    def _find_stuck(self, ranks: RankProcesses) -> str | None:
        """Says which rank has given no sign of life for too long."""
        now_ns = time.monotonic_ns()
        for name, status in ranks.statuses():
            silent_s = stuck_for(status, now_ns=now_ns, step_timeout_s=self._step_timeout_s)
            if silent_s is not None:
                return f"{name}stuck: no sign of life for {silent_s:.0f} s"
        return None


def stuck_for(status: Status, *, now_ns: int, step_timeout_s: float) -> float | None:
    """For how many seconds a worker has given no sign of life, if that is too long; else None.

    Bounded while it serves, or is paused; how long loading and warming may take is the start time-out's matter.
    """
    if status.phase not in (Phase.IDLE, Phase.RUNNING, Phase.PAUSED) or not status.heartbeat_ns:
        return None
    silent_s = (now_ns - status.heartbeat_ns) / _NS_PER_S
    return silent_s if silent_s > step_timeout_s + status.planned_tokens * STUCK_PER_TOKEN_S else None
