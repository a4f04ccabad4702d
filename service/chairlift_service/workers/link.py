"""The service's end of the two rings. The only user of the worker's ipc package's channel in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import structlog
from chairlift_worker.ipc.channel import ServiceChannel
from chairlift_worker.ipc.messages import (
    AddRequestMsg,
    AnswerMsg,
    CancelMsg,
    ControlMsg,
    DoneMsg,
    FlushedMsg,
    HoldMsg,
    ReadyMsg,
    ShutdownMsg,
    StartFailedMsg,
    StepMsg,
    WeightsMsg,
    decode_worker,
    encode,
)
from chairlift_worker.ipc.ring import CorruptRecordError, RecordTooLargeError

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.workers.questions import Questions

MAX_RECORDS_PER_TURN: Final = 32
"""Records handled before the event loop gets a turn."""

LEFT_FOR_CANCELS_BYTES: Final = 16 * 1024
"""Room in the requests ring that new requests leave free: some 500 cancellations, or holds."""

RETRY_S: Final = 0.005
"""How long to wait for room in a full ring before the next try to send cancellations and holds."""

_log = structlog.get_logger(__name__)


class StepSink(Protocol):
    """Takes what steps bring."""

    def apply(self, step: StepMsg) -> None:
        """Applies one step. Must not raise."""
        ...


class Link:
    """Sends requests, cancellations and holds, hands steps to a sink. Of one worker; a new worker gets a new link.

    `questions` are those that the worker answers. `hello` is its first message. `broken` is set, in words, when the
    results ring or what came through it cannot be: nothing is received any more then, and the worker is to be given up.
    """

    def __init__(self, *, channel: ServiceChannel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._sink: StepSink | None = None
        self._unsent: dict[int, CancelMsg | HoldMsg] = {}  # at most one for each live request: its newest
        self._retry: asyncio.TimerHandle | None = None
        self._open = False
        self.questions = Questions(send=self._send_control)
        self.hello: asyncio.Future[ReadyMsg | StartFailedMsg] = self._loop.create_future()
        self.broken: asyncio.Future[str] = self._loop.create_future()

    def open(self, *, sink: StepSink) -> None:
        """Starts to receive."""
        self._sink = sink
        self._open = True
        self._loop.add_reader(self._channel.results_doorbell.fd, self._on_bell)
        self._loop.call_soon(self._on_bell)

    def close(self) -> None:
        """Sends and receives nothing any more: the worker is gone. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._channel.results_doorbell.fd)
        self._unsent.clear()
        if self._retry is not None:
            self._retry.cancel()
        self.questions.close()

    def add(self, messages: Sequence[AddRequestMsg]) -> None:
        """Sends all of them, or none.

        Raises ServiceError: WORKER_LOST, QUEUE_FULL where the ring has no room now, MESSAGE_TOO_LARGE where it never
        could have.
        """
        if not self._open:
            raise ServiceError(Reason.WORKER_LOST, "the worker is gone")
        try:
            sent = self._channel.requests.try_send_all(
                [encode(message) for message in messages], leave=LEFT_FOR_CANCELS_BYTES
            )
        except RecordTooLargeError as error:
            limit = self._channel.requests.max_record_bytes - LEFT_FOR_CANCELS_BYTES
            message = f"the requests take more than the {limit} bytes that can be handed over at once"
            raise ServiceError(Reason.MESSAGE_TOO_LARGE, message, metadata={"max_bytes": str(limit)}) from error
        except CorruptRecordError as error:
            self._break(str(error))
            raise ServiceError(Reason.WORKER_LOST, "the worker is gone") from error
        if not sent:
            raise ServiceError(Reason.QUEUE_FULL, "the way to the worker is full")

    def cancel(self, uid: int) -> None:
        """Sends a Cancel now, or as soon as there is room. Never fails; does nothing once the worker is gone."""
        self._send_soon(CancelMsg(uid=uid))

    def hold(self, uid: int, *, held: bool) -> None:
        """Has the worker hold a request, or go on with it, as soon as there is room. Never fails, as `cancel`."""
        if not isinstance(self._unsent.get(uid), CancelMsg):  # which says the last of it
            self._send_soon(HoldMsg(uid=uid, held=held))

    def shutdown(self) -> bool:
        """Asks the worker to exit after its step. False if the request could not be handed over."""
        try:
            return self._open and self._channel.requests.try_send(encode(ShutdownMsg()))
        except CorruptRecordError:
            return False

    def receive_rest(self) -> None:
        """Handles what a worker that is gone has left in the ring."""
        while self._open and self._receive_one():
            pass

    def _on_bell(self) -> None:
        if not self._open or self.broken.done():
            return
        results = self._channel.results
        self._channel.results_doorbell.clear()  # before reading, or a ring that comes meanwhile would be lost
        results.disarm()
        for _ in range(MAX_RECORDS_PER_TURN):
            if not self._receive_one() and (self.broken.done() or not results.arm()):
                return
        self._loop.call_soon(self._on_bell)

    def _receive_one(self) -> bool:
        """Handles the next record. False if there is none, or none that can be trusted."""
        if self.broken.done():
            return False
        try:
            record = self._channel.results.receive()
            if record is None:
                return False
            self._handle(decode_worker(record))
        except (CorruptRecordError, msgspec.MsgspecError) as error:
            self._break(str(error))
            return False
        except Exception:  # noqa: BLE001 - a bug in what applies steps: loud, rather than streams that stand still
            _log.exception("a message of the worker could not be applied")
            self._break("a fault of the service")
            return False
        return True

    def _handle(self, message: ReadyMsg | StartFailedMsg | StepMsg | AnswerMsg) -> None:
        match message:
            case StepMsg():
                assert self._sink is not None  # set by open()
                self._sink.apply(message)
            case FlushedMsg() | DoneMsg() | WeightsMsg():
                self.questions.answered(message)
            case ReadyMsg() | StartFailedMsg():
                if not self.hello.done():
                    self.hello.set_result(message)

    def _send_control(self, message: ControlMsg) -> None:
        """Raises ServiceError: WORKER_LOST or QUEUE_FULL."""
        if not self._open:
            raise ServiceError(Reason.WORKER_LOST, "the worker is gone")
        try:
            sent = self._channel.requests.try_send(encode(message))
        except CorruptRecordError as error:
            self._break(str(error))
            raise ServiceError(Reason.WORKER_LOST, "the worker is gone") from error
        if not sent:
            raise ServiceError(Reason.QUEUE_FULL, "the way to the worker is full")

    def _break(self, why: str) -> None:
        if not self.broken.done():
            _log.error("the rings are of no use any more", error=why)
            self.broken.set_result(why)

    def _send_soon(self, message: CancelMsg | HoldMsg) -> None:
        if self._open:
            self._unsent[message.uid] = message
            if self._retry is None:  # else the ring is full, and those before this one come first
                self._send_unsent()

    def _send_unsent(self) -> None:
        self._retry = None
        try:
            while self._unsent:
                uid, message = next(iter(self._unsent.items()))
                if not self._channel.requests.try_send(encode(message)):
                    break
                del self._unsent[uid]
        except CorruptRecordError as error:
            self._break(str(error))
            self._unsent.clear()
        if self._unsent:
            self._retry = self._loop.call_later(RETRY_S, self._send_unsent)
