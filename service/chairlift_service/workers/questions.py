"""What the worker is asked, and answers between two steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from chairlift_worker.ipc.messages import AnswerMsg, ControlMsg

from chairlift_service.errors import Reason, ServiceError

ANSWER_TIMEOUT_S: Final = 120.0
"""How long the worker may take to come to the end of its step and answer; one that is stuck is found otherwise."""


class Questions:
    """Questions to one worker by number, until they are answered. As many as calls wait for an answer."""

    def __init__(self, *, send: Callable[[ControlMsg], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[AnswerMsg]] = {}

    def ask(self, make: Callable[[int], ControlMsg]) -> asyncio.Future[AnswerMsg]:
        """Sends the message that `make` makes of the question's number; the answer to come.

        Raises ServiceError if it cannot be sent: WORKER_LOST or QUEUE_FULL. The answer raises WORKER_LOST where none
        will come.
        """
        number = next(self._numbers)
        self._send(make(number))
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._forget(number))
        return answer

    def answered(self, answer: AnswerMsg) -> None:
        """Hands an answer over, unless nobody waits for it any more."""
        waiting = self._waiting.get(answer.op)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _forget(self, number: int) -> None:
        answer = self._waiting.pop(number)
        if not answer.cancelled():
            answer.exception()  # looked at, so that asyncio does not complain where nobody waits for the answer

    def close(self) -> None:
        """The worker is gone: nobody gets an answer."""
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(ServiceError(Reason.WORKER_LOST, "the worker is gone"))


async def in_time(answer: asyncio.Future[AnswerMsg], *, timeout_s: float = ANSWER_TIMEOUT_S) -> AnswerMsg:
    """The answer. Raises ServiceError with DEADLINE_EXCEEDED if it does not come within `timeout_s`."""
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError as error:
        raise ServiceError(Reason.DEADLINE_EXCEEDED, f"no answer within {timeout_s:.0f} s") from error
