"""What operators do to the service: pause, resume, drain, stop, flush, other weights. Also what a signal does."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

import structlog
from chairlift_worker.ipc.messages import (
    AnswerMsg,
    FlushedMsg,
    FlushPrefixCacheMsg,
    PauseMsg,
    ResumeMsg,
    UpdateWeightsMsg,
    WeightsMsg,
)

from chairlift_service import errors
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.lifecycle import STANDING_STILL, Happening, Lifecycle, State
from chairlift_service.requests.readers import Readers
from chairlift_service.requests.registry import Registry
from chairlift_service.workers.line import WorkerLine
from chairlift_service.workers.questions import in_time

LOOK_S: Final = 0.02
"""How often it is looked whether all requests are over."""

_log = structlog.get_logger(__name__)


class Operations:
    """Changes the state, and makes worker and requests follow.

    The worker is asked first and the state changes in the same turn of the loop, so that what a call was not allowed
    to do, or could not send, has changed nothing. Methods raise ServiceError, with WRONG_STATE where the state does
    not allow them.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        registry: Registry,
        readers: Readers,
        line: WorkerLine,
        update_timeout_s: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._readers = readers
        self._line = line
        self._update_timeout_s = update_timeout_s

    @property
    def busy(self) -> bool:
        """Whether a request is live, or one that is over is still being read."""
        return self._registry.num_live > 0 or self._readers.num_of_requests > 0

    async def pause(self) -> int:
        """Lets no further step begin; returns the number of live requests once nothing is computed any more."""
        self._lifecycle.check(Happening.PAUSE)
        answer = self._line.ask(lambda op: PauseMsg(op=op))
        self._enter(Happening.PAUSE)
        await in_time(answer)
        return self._registry.num_live

    async def resume(self) -> None:
        """Ends a pause, a drain or a stop."""
        self._lifecycle.check(Happening.RESUME)
        answer = self._line.ask(lambda op: ResumeMsg(op=op))
        self._enter(Happening.RESUME)
        await in_time(answer)

    async def drain(self) -> None:
        """Refuses new requests and waits until nothing is live or being read, for as long as its caller waits."""
        self._begin_drain(Happening.DRAIN)
        while self.busy:
            if self._lifecycle.state not in (State.DRAINING, State.ENDING):
                raise ServiceError(Reason.WRONG_STATE, "the drain was ended before all requests were over")
            await asyncio.sleep(LOOK_S)

    def begin_end(self) -> None:
        """A signal came: refuses new requests for good. What is paused goes on, so that it can end."""
        if self._lifecycle.may(Happening.SIGNAL):
            try:
                self._begin_drain(Happening.SIGNAL)
            except ServiceError as error:  # the way to the worker is full, or gone: the end comes all the same
                _log.warning("what is paused cannot go on", error=str(error))
                self._enter(Happening.SIGNAL)

    async def stop(self) -> int:
        """Ends every live request with STOPPED; returns their number once the worker has let go of them."""
        self._lifecycle.check(Happening.STOP)
        self._enter(Happening.STOP)
        stopped = self._registry.all_live()
        for generation in stopped:
            generation.end(ServiceError(Reason.STOPPED, "the service was stopped"))
            self._line.cancel(generation.uid)
            self._readers.notify(generation)
        while any(self._registry.live(generation.uid) is generation for generation in stopped):  # noqa: ASYNC110 - confirmed one by one
            await asyncio.sleep(LOOK_S)
        return len(stopped)

    async def flush_prefix_cache(self) -> int:
        """Forgets the cached pages that no request uses; returns their number."""
        self._lifecycle.model()
        answer = await in_time(self._line.ask(lambda op: FlushPrefixCacheMsg(op=op)))
        assert isinstance(answer, FlushedMsg)  # what the worker answers to this question
        return answer.num_pages

    async def update_weights(self, folder: str) -> WeightsMsg:
        """Other weights; see admin_service.proto. The update goes on where the call is cancelled or times out."""
        if not folder.startswith("/") or not folder.isprintable():
            raise errors.from_violations([errors.Violation("path", "must be the absolute path of a folder")])
        self._lifecycle.check(Happening.UPDATE)
        answer = self._line.ask(lambda op: UpdateWeightsMsg(op=op, folder=folder))
        self._enter(Happening.UPDATE)
        # Here rather than after the wait below, which may be given up: the state must follow the worker.
        answer.add_done_callback(functools.partial(self._on_updated, folder))
        message = await in_time(asyncio.shield(answer), timeout_s=self._update_timeout_s)
        assert isinstance(message, WeightsMsg)  # what the worker answers to this question
        if message.error:
            raise errors.from_worker(message.error)
        return message

    def _on_updated(self, folder: str, answer: asyncio.Future[AnswerMsg]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return  # the worker is gone; who replaces it sees to the state
        message = answer.result()
        if isinstance(message, WeightsMsg) and not message.error:
            self._lifecycle.weights = folder
        if self._lifecycle.may(Happening.UPDATED):
            self._enter(Happening.UPDATED)

    def _begin_drain(self, happening: Happening) -> None:
        self._lifecycle.check(happening)
        if self._lifecycle.state in STANDING_STILL:
            self._line.ask(lambda op: ResumeMsg(op=op))
        self._enter(happening)

    def _enter(self, happening: Happening) -> None:
        before = self._lifecycle.state
        self._lifecycle.enter(happening)
        now = self._lifecycle.state
        self._registry.show_paused(paused=now in STANDING_STILL)
        if now is not before:
            _log.info("state changed", before=before.name, now=now.name, live=self._registry.num_live)
