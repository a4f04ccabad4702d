"""What waits in the line, sent to a new worker."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from chairlift_worker.ipc.messages import EndingReason

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.requests.carried import resumed_message, untold_ending
from chairlift_service.requests.dispatch import Dispatcher
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.registry import Registry
from chairlift_service.workers.line import WorkerLine
from chairlift_service.workers.link import RETRY_S, Link
from chairlift_service.workers.worker import Worker

LOOK_S: Final = 0.005
"""How often it is looked whether a request on probation has got a token."""

_log = structlog.get_logger(__name__)


class CarryOver:
    """Sends requests with their tokens so far, in the order in which they came.

    Blamed for a loss is who was in the batch. So that the neighbours of a request that kills workers outlive it, those
    that were blamed before are sent one by one, each on probation until it has got a token: if the worker is lost
    meanwhile, the one on probation alone is blamed.
    """

    def __init__(self, *, line: WorkerLine, registry: Registry, dispatcher: Dispatcher) -> None:
        self._line = line
        self._registry = registry
        self._dispatcher = dispatcher
        self._on_probation: int | None = None  # uid

    async def run(self, worker: Worker) -> None:
        """Until nothing waits any more, or the worker is lost."""
        task = asyncio.create_task(self._send_all(worker.link))
        try:
            await asyncio.wait((task, worker.supervisor.lost), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()  # a bug is to be heard of
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def suspects(self, present: frozenset[int]) -> frozenset[int]:
        """Which of those in the batch are to be blamed for the loss of the worker. Ends a probation."""
        suspect, self._on_probation = self._on_probation, None
        return frozenset({suspect}) if suspect in present else present

    async def _send_all(self, link: Link) -> None:
        """Sends what waits, as the ring has room."""
        while (uid := self._line.first_waiting) is not None and not link.broken.done():
            generation = self._registry.live(uid)
            try:
                if generation is not None:
                    self._send(generation, link)
            except ServiceError as error:
                if error.reason is Reason.MESSAGE_TOO_LARGE and generation is not None:
                    self._registry.fail(generation, error)
                elif error.reason is not Reason.QUEUE_FULL:
                    _log.warning("request not carried over", error=str(error))
                    return  # the worker is lost again
                else:
                    await asyncio.sleep(RETRY_S)
                    continue
            self._line.let_go(uid)
            if generation is not None and generation.course.losses:
                await self._see_through(generation)

    def _send(self, generation: Generation, link: Link) -> None:
        """Raises ServiceError as `Link.add`."""
        if generation.ending is not None:  # its readers have it; only the worker's word was missing
            self._registry.confirm(generation, generation.ending)
        elif generation.cancelled or generation.left:  # the worker was lost before it had heard of that
            self._dispatcher.end_here(generation.uid, EndingReason.CANCELLED)
        elif (reason := untold_ending(generation)) is not None:
            self._dispatcher.end_here(generation.uid, reason)
        else:
            link.add([resumed_message(generation)])
            if generation.num_full:
                link.hold(generation.uid, held=True)

    async def _see_through(self, generation: Generation) -> None:
        """Waits until a request that may be the cause of a loss has got a token, or is over or held."""
        self._on_probation = generation.uid
        before = len(generation.output)
        while (  # noqa: ASYNC110 - every token would have to set an event
            self._registry.live(generation.uid) is generation
            and len(generation.output) == before
            and not generation.num_full
        ):
            await asyncio.sleep(LOOK_S)
        self._on_probation = None
