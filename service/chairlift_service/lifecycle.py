"""What the server does now: starting, serving, draining, failed. One owner of that state; health follows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from chairlift.v1 import info_service_pb2
from chairlift_worker.ipc.messages import ModelCardMsg, SettingMsg

from chairlift_service.defaults import RequestDefaults
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.health import Health
from chairlift_service.text.tokenizer import Tokenizer

State = info_service_pb2.ServerState


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the service knows once the worker has loaded the model."""

    card: ModelCardMsg
    tokenizer: Tokenizer
    defaults: RequestDefaults
    has_chat_template: bool
    prefix_sharing: bool  # the worker may reuse what prompts have in common
    settings: tuple[SettingMsg, ...]  # the worker's, resolved


class Lifecycle:
    """STARTING -> SERVING -> DRAINING, and FAILED from anywhere. Health is SERVING in SERVING alone."""

    def __init__(self, *, healths: Sequence[Health]) -> None:
        self._healths = healths  # one for each server
        self._state: State = info_service_pb2.SERVER_STATE_STARTING
        self._model: ServedModel | None = None

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    @property
    def worker_settings(self) -> tuple[SettingMsg, ...]:
        """The worker's settings as it resolved them; empty until it can serve."""
        return self._model.settings if self._model is not None else ()

    def serve(self, model: ServedModel) -> None:
        """The worker can serve. Does nothing once the server drains or has failed."""
        self._model = model
        if self._state == info_service_pb2.SERVER_STATE_STARTING:
            self._enter(info_service_pb2.SERVER_STATE_SERVING)

    def drain(self) -> None:
        """New requests are refused from now on."""
        if self._state != info_service_pb2.SERVER_STATE_FAILED:
            self._enter(info_service_pb2.SERVER_STATE_DRAINING)

    def fail(self) -> None:
        """The worker is gone."""
        self._enter(info_service_pb2.SERVER_STATE_FAILED)

    def model(self) -> ServedModel:
        """The model. Raises ServiceError with NOT_READY while it is being loaded."""
        if self._model is None:
            raise ServiceError(Reason.NOT_READY, "the model is being loaded")
        return self._model

    def accepting(self) -> ServedModel:
        """The model, if new requests are taken. Raises ServiceError: NOT_READY, DRAINING or WORKER_LOST."""
        if self._state == info_service_pb2.SERVER_STATE_DRAINING:
            raise ServiceError(Reason.DRAINING, "the service finishes what it has and takes nothing new")
        if self._state == info_service_pb2.SERVER_STATE_FAILED:
            raise ServiceError(Reason.WORKER_LOST, "the worker is gone")
        return self.model()

    def _enter(self, state: State) -> None:
        self._state = state
        for health in self._healths:
            health.set_serving(serving=state == info_service_pb2.SERVER_STATE_SERVING)
