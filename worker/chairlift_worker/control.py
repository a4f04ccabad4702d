"""What operators ask of a running worker: stand still, go on, take other weights, forget prefixes."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from chairlift_worker.ipc.messages import (
    AnswerMsg,
    ControlMsg,
    DoneMsg,
    FlushedMsg,
    FlushPrefixCacheMsg,
    PauseMsg,
    ResumeMsg,
    UpdateWeightsMsg,
    WeightsMsg,
)
from chairlift_worker.model.errors import WeightsError
from chairlift_worker.roster import Roster


class Weights(Protocol):
    """The weights that the worker computes with."""

    def update(self, folder: str) -> int:
        """Replaces them by those of a folder; returns the number of tensors.

        Raises WeightsError with everything as it was. Any other exception means that the worker cannot go on. Called
        in a thread of its own, while no step runs.
        """
        ...


class Control:
    """Whether steps may begin, and what happens while they may not.

    An update of the weights runs in a thread, so that cancellations, deadlines and the heartbeat go on. It holds steps
    back until it is over, also where a `ResumeMsg` comes in between.
    """

    def __init__(self, *, roster: Roster, weights: Weights) -> None:
        self._roster = roster
        self._weights = weights
        self._paused = False
        self._update: _Update | None = None

    @property
    def is_updating(self) -> bool:
        """Whether weights are being read; `finished` is then to be asked often."""
        return self._update is not None

    @property
    def stands_still(self) -> bool:
        """Whether no step may begin."""
        return self._paused or self._update is not None

    def handle(self, message: ControlMsg) -> AnswerMsg | None:
        """Does what is asked; the answer, unless it comes later, from `finished`."""
        match message:
            case FlushPrefixCacheMsg():
                return FlushedMsg(op=message.op, num_pages=self._roster.memory.flush())
            case PauseMsg():
                self._paused = True
            case ResumeMsg():
                self._paused = False
            case UpdateWeightsMsg():
                return self._begin(message)
        return DoneMsg(op=message.op)

    def finished(self) -> WeightsMsg | None:
        """The answer to an update that is over by now. All that was computed with the old weights is given up then.

        Raises what the update raised, where the weights are in doubt.
        """
        update = self._update
        if update is None or not update.is_over:
            return None
        self._update = None
        if isinstance(update.error, WeightsError):
            return _refused(update.op, str(update.error))
        if update.error is not None:
            raise update.error
        num_requests = self._roster.give_up_computed(time.monotonic_ns())
        num_pages = self._roster.memory.flush()
        return WeightsMsg(
            op=update.op, error="", num_tensors=update.num_tensors, num_requests=num_requests, num_pages=num_pages
        )

    def _begin(self, message: UpdateWeightsMsg) -> WeightsMsg | None:
        if not self._paused or self._update is not None:
            return _refused(message.op, "WRONG_STATE: the worker is not paused, or other weights are being read")
        self._update = _Update(op=message.op, folder=message.folder, weights=self._weights)
        return None


class _Update:
    """One update, in its thread from the beginning on."""

    def __init__(self, *, op: int, folder: str, weights: Weights) -> None:
        self.op = op
        self.num_tensors = 0
        self.error: BaseException | None = None
        self._folder = folder
        self._weights = weights
        # A daemon: files that do not answer must not keep the worker from ending.
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.num_tensors = self._weights.update(self._folder)
        except BaseException as error:  # noqa: BLE001 - the engine's thread raises it again
            self.error = error


def _refused(op: int, error: str) -> WeightsMsg:
    return WeightsMsg(op=op, error=error, num_tensors=0, num_requests=0, num_pages=0)
