"""Workers one after the other: the first one, and whoever takes over when it is lost."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from chairlift_worker.ipc.messages import PauseMsg, ReadyMsg, ResumeMsg, UpdateWeightsMsg, WeightsMsg

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.lifecycle import STANDING_STILL, Happening, Lifecycle
from chairlift_service.requests.dispatch import Dispatcher
from chairlift_service.requests.registry import Registry
from chairlift_service.workers.carry_over import CarryOver
from chairlift_service.workers.figures import WorkerFigures
from chairlift_service.workers.line import WorkerLine
from chairlift_service.workers.supervisor import WorkerStartError
from chairlift_service.workers.worker import Worker, WorkerFactory, check_same

MAX_LOSSES: Final = 2
"""Lost workers that a request is blamed for before it is taken for the cause, and ended."""

STEADY_S: Final = 10.0
"""A worker that was lost earlier than that, and before its first step, did not help: the wait before the next grows."""

BACK_OFF_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before a successor is started, by the number of workers in a row that did not help."""

END_S: Final = 1.0
"""How long a successor that is of no use may take to end by itself."""

_log = structlog.get_logger(__name__)


class Succession:
    """Has a worker run, always, and carries what lives from a lost one over to the next.

    ```
    ready -- lost --> its requests wait in the line; those that are blamed for MAX_LOSSES losses fail
      ^                 |
      |                 v  back-off, start, weights, pause
      '---- all that waits is sent, with its tokens so far ---- or, without one for `restart_limit_s`: `failed`
    ```
    Who is blamed for a loss, `CarryOver` says.
    """

    def __init__(
        self,
        *,
        factory: WorkerFactory,
        line: WorkerLine,
        lifecycle: Lifecycle,
        registry: Registry,
        dispatcher: Dispatcher,
        figures: WorkerFigures,
        restart_limit_s: float,
    ) -> None:
        self._factory = factory
        self._line = line
        self._lifecycle = lifecycle
        self._registry = registry
        self._dispatcher = dispatcher
        self._figures = figures
        self._restart_limit_s = restart_limit_s
        self._worker: Worker | None = None
        self._incarnation = 0
        self._task: asyncio.Task[None] | None = None
        self._useless = 0  # workers in a row that did not help
        self._gone_since = 0.0  # the loop's time
        self._carry_over = CarryOver(line=line, registry=registry, dispatcher=dispatcher)
        self._fault = ""  # of the latest successor that could not be started
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the worker; empty while there is none."""
        return self._worker.supervisor.pids if self._worker is not None else ()

    @property
    def worker(self) -> Worker | None:
        """The one there is, or that is being started."""
        return self._worker

    async def start(self) -> ReadyMsg:
        """Starts the first worker and waits until it can serve. Raises WorkerStartError; it is dead then."""
        self._line.open(ends=self._dispatcher)
        worker = self._next_worker()
        ready = await worker.supervisor.start()
        self._factory = self._factory.like(ready.settings)
        self._line.connect(worker.link)
        self._task = asyncio.create_task(self._go_on(worker, ready), name="succession of workers")
        self._task.add_done_callback(self._on_end)
        return ready

    async def stop(self, *, patience_s: float) -> None:
        """Ends the worker, and the succession; see `Supervisor.stop`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._worker is not None:
            await self._worker.end(patience_s=patience_s)
        self._line.close()

    def _next_worker(self) -> Worker:
        """Raises WorkerStartError where there is no memory for its channel."""
        self._incarnation += 1
        try:
            self._worker = self._factory.make(sink=self._dispatcher, incarnation=self._incarnation)
        except OSError as error:
            raise WorkerStartError(f"worker: cannot be reached: {error}") from error
        self._figures.watch(self._worker.channel.status)
        return self._worker

    async def _go_on(self, worker: Worker, first: ReadyMsg) -> None:
        """From one loss to the next, until no successor can be had."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            why = await asyncio.shield(worker.supervisor.lost)
            if self._figures.has_stepped or loop.time() - began >= STEADY_S:
                self._useless = 0
            if not self._useless:
                self._gone_since = loop.time()
            self._bury(worker)
            successor = await self._find(first) if self._restart_limit_s else None
            if successor is None:
                self._give_up(why)
                return
            worker = successor
            self._useless += 1  # until it has shown that it helps
            took_s = loop.time() - self._gone_since
            _log.info("worker replaced", pid=worker.supervisor.pids, incarnation=self._incarnation, seconds=took_s)
            self._lifecycle.show_recovering(recovering=False)
            await self._carry_over.run(worker)

    def _bury(self, worker: Worker) -> None:
        """What it had waits for the next one, but for requests that were blamed too often."""
        blamed = self._carry_over.suspects(worker.channel.roll.read())
        self._figures.bury()
        self._lifecycle.show_recovering(recovering=True)
        if self._lifecycle.may(Happening.UPDATED):  # whoever asked for other weights hears that the worker is gone
            self._lifecycle.enter(Happening.UPDATED)
        for generation in self._registry.all_live():
            generation.course.losses += generation.uid in blamed
            if generation.course.losses >= MAX_LOSSES:
                _log.error("request given up", request_id=generation.request_id, losses=generation.course.losses)
                error = ServiceError(
                    Reason.POISONED_REQUEST, "the worker was lost twice while it computed this request"
                )
                self._registry.fail(generation, error)
            generation.lose_worker()
        self._line.disconnect(generation.uid for generation in self._registry.all_live())
        worker.close()
        self._worker = None

    async def _find(self, first: ReadyMsg) -> Worker | None:
        """A worker that is ready to take over; None if there is none for too long."""
        try:
            async with asyncio.timeout_at(self._gone_since + self._restart_limit_s):
                while True:
                    await asyncio.sleep(BACK_OFF_S[min(self._useless, len(BACK_OFF_S) - 1)])
                    try:
                        return await self._start_successor(first)
                    except (WorkerStartError, ServiceError) as error:
                        _log.error("worker not replaced", error=str(error), incarnation=self._incarnation)
                        self._fault = f": {error}"
                        self._useless += 1
        except TimeoutError:
            return None

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("workers are not replaced any more", exc_info=error)
            self.failed.set_result("a fault of the service")

    def _give_up(self, why: str) -> None:
        limit = f"not replaced within worker_restart_limit = {self._restart_limit_s:g} s"
        self.failed.set_result(f"{why}; {limit}{self._fault}" if self._restart_limit_s else why)

    async def _start_successor(self, first: ReadyMsg) -> Worker:
        """Raises WorkerStartError or ServiceError, with nothing left of it."""
        worker = self._next_worker()
        try:
            ready = await worker.supervisor.start()
            check_same(first.model, ready.model)
            await self._bring_up_to_date(worker)
        except BaseException:
            self._worker = None
            await worker.end(patience_s=END_S)
            raise
        self._line.connect(worker.link)
        return worker

    async def _bring_up_to_date(self, worker: Worker) -> None:
        """Gives it the weights and the pause that the one before had. Raises ServiceError or WorkerStartError."""
        weights, link, lost = self._lifecycle.weights, worker.link, worker.supervisor.lost
        if weights is not None:
            link.questions.ask(lambda op: PauseMsg(op=op))
            question = link.questions.ask(lambda op: UpdateWeightsMsg(op=op, folder=weights))
            await asyncio.wait((question, lost), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise WorkerStartError(f"worker: lost while it took the weights of {weights}: {lost.result()}")
            answer = question.result()
            assert isinstance(answer, WeightsMsg)  # what the worker answers to this question
            if answer.error:
                raise WorkerStartError(f"worker: weights of {weights} cannot be taken again: {answer.error}")
        if self._lifecycle.state in STANDING_STILL:
            link.questions.ask(lambda op: PauseMsg(op=op))
        elif weights is not None:
            link.questions.ask(lambda op: ResumeMsg(op=op))
