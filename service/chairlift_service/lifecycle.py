"""What the server does now, and what may come after it. One owner of that state; health follows it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Final

from chairlift.v1 import info_service_pb2
from chairlift_worker.ipc.messages import ModelCardMsg, SettingMsg

from chairlift_service.defaults import RequestDefaults
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.health import Health
from chairlift_service.text.chat import ChatPrompts
from chairlift_service.text.tokenizer import Tokenizer


class State(enum.Enum):
    """What the server does."""

    STARTING = enum.auto()  # the model is being loaded
    SERVING = enum.auto()
    PAUSED = enum.auto()  # takes requests, computes none
    UPDATING = enum.auto()  # as PAUSED, while the worker takes other weights
    DRAINING = enum.auto()  # lets what is there end; an operator may resume
    STOPPED = enum.auto()  # idle; an operator may resume
    ENDING = enum.auto()  # lets what is there end, and then the process
    FAILED = enum.auto()  # the worker is gone, and so are all attempts to replace it


class Happening(enum.Enum):
    """What changes the state."""

    READY = "ready"  # the worker can serve
    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"
    STOP = "stop"
    UPDATE = "update of the weights"
    UPDATED = "end of the update"
    SIGNAL = "signal to end"
    LOSS = "loss of the worker for good"


_S, _H = State, Happening
_RUNNING: Final = (_S.SERVING, _S.PAUSED, _S.DRAINING)

TRANSITIONS: Final[Mapping[tuple[State, Happening], State]] = {
    (_S.STARTING, _H.READY): _S.SERVING,
    (_S.SERVING, _H.PAUSE): _S.PAUSED,
    (_S.PAUSED, _H.UPDATE): _S.UPDATING,
    (_S.UPDATING, _H.UPDATED): _S.PAUSED,
    (_S.ENDING, _H.UPDATED): _S.ENDING,
    (_S.ENDING, _H.DRAIN): _S.ENDING,  # waits along
    **{(state, _H.RESUME): _S.SERVING for state in (_S.PAUSED, _S.DRAINING, _S.STOPPED)},
    **{(state, _H.DRAIN): _S.DRAINING for state in _RUNNING},
    **{(state, _H.STOP): _S.STOPPED for state in _RUNNING},
    **{(state, _H.SIGNAL): _S.ENDING for state in State if state is not _S.FAILED},
    **{(state, _H.LOSS): _S.FAILED for state in State},
}
"""All there is. What does not stand here cannot happen: an operator who asks for it is refused."""

_SHOWN: Final[Mapping[State, info_service_pb2.ServerState]] = {
    _S.STARTING: info_service_pb2.SERVER_STATE_STARTING,
    _S.SERVING: info_service_pb2.SERVER_STATE_SERVING,
    _S.PAUSED: info_service_pb2.SERVER_STATE_PAUSED,
    _S.UPDATING: info_service_pb2.SERVER_STATE_PAUSED,
    _S.DRAINING: info_service_pb2.SERVER_STATE_DRAINING,
    _S.STOPPED: info_service_pb2.SERVER_STATE_STOPPED,
    _S.ENDING: info_service_pb2.SERVER_STATE_DRAINING,
    _S.FAILED: info_service_pb2.SERVER_STATE_FAILED,
}
"""What users see of it, while there is a worker."""

ALL_SHOWN: Final = (*dict.fromkeys(_SHOWN.values()), info_service_pb2.SERVER_STATE_RECOVERING)

HEALTHY: Final = frozenset({_S.SERVING, _S.PAUSED, _S.UPDATING})
"""Where new requests are taken, and health is SERVING if there is a worker."""

STANDING_STILL: Final = frozenset({_S.PAUSED, _S.UPDATING})
"""Where no step begins."""

_REFUSALS: Final[Mapping[State, tuple[Reason, str]]] = {
    _S.DRAINING: (Reason.DRAINING, "the service finishes what it has and takes nothing new"),
    _S.ENDING: (Reason.DRAINING, "the service finishes what it has and takes nothing new"),
    _S.STOPPED: (Reason.STOPPED, "the service is stopped"),
    _S.FAILED: (Reason.WORKER_LOST, "the worker is gone"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the service knows once the worker has loaded the model."""

    card: ModelCardMsg
    tokenizer: Tokenizer
    defaults: RequestDefaults
    chat: ChatPrompts | None  # None: it has no chat template
    prefix_sharing: bool  # the worker may reuse what prompts have in common
    settings: tuple[SettingMsg, ...]  # the worker's, resolved


class Lifecycle:
    """Owns the state, which changes by `TRANSITIONS` alone, and the model once it is known."""

    def __init__(self, *, healths: Sequence[Health]) -> None:
        self._healths = healths  # one for each server
        self._state = State.STARTING
        self._model: ServedModel | None = None
        self._recovering = False
        self.weights: str | None = None  # folder that they were taken from last; None: the model's own

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    @property
    def shown(self) -> info_service_pb2.ServerState:
        """The state as users see it."""
        if self._recovering and self._state is not State.FAILED:
            return info_service_pb2.SERVER_STATE_RECOVERING
        return _SHOWN[self._state]

    def show_recovering(self, *, recovering: bool) -> None:
        """Whether there is no worker for now. The state stays what it is, and holds again when there is one."""
        self._recovering = recovering
        self._tell_health()

    @property
    def worker_settings(self) -> tuple[SettingMsg, ...]:
        """The worker's settings as it resolved them; empty until it can serve."""
        return self._model.settings if self._model is not None else ()

    def serve(self, model: ServedModel) -> None:
        """The worker can serve. Changes no state once the server ends."""
        self._model = model
        if self.may(Happening.READY):
            self.enter(Happening.READY)

    def may(self, happening: Happening) -> bool:
        """Whether this can happen now."""
        return (self._state, happening) in TRANSITIONS

    def check(self, happening: Happening) -> None:
        """Raises ServiceError, with NOT_READY or WRONG_STATE, if this cannot happen now."""
        if not self.may(happening):
            self.model()
            now = self._state.name
            raise ServiceError(Reason.WRONG_STATE, f"no {happening.value} while {now}", metadata={"state": now})

    def enter(self, happening: Happening) -> None:
        """It happens. Raises ServiceError as `check`."""
        self.check(happening)
        self._state = TRANSITIONS[self._state, happening]
        self._tell_health()

    def _tell_health(self) -> None:
        for health in self._healths:
            health.set_serving(serving=self._state in HEALTHY and not self._recovering)

    def model(self) -> ServedModel:
        """The model. Raises ServiceError with NOT_READY while it is being loaded."""
        if self._model is None:
            raise ServiceError(Reason.NOT_READY, "the model is being loaded")
        return self._model

    def accepting(self) -> ServedModel:
        """The model, if new requests are taken. Raises ServiceError: NOT_READY, DRAINING, STOPPED or WORKER_LOST."""
        if self._state in _REFUSALS:
            reason, message = _REFUSALS[self._state]
            raise ServiceError(reason, message)
        return self.model()
