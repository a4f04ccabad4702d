"""InfoService."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Final

import msgspec
from chairlift.v1 import info_service_pb2, info_service_pb2_grpc
from chairlift_worker.ipc.messages import SettingMsg
from chairlift_worker.ipc.status import StatusReader

from chairlift_service import convert
from chairlift_service.lifecycle import SHOWN, Lifecycle
from chairlift_service.requests.registry import Registry
from chairlift_service.servicers.edge import CallContext, guarded
from chairlift_service.supervisor import Supervisor

_pb = info_service_pb2

_NOT_STATISTICS: Final = frozenset({"phase", "heartbeat_ns", "step", "planned_tokens"})


class InfoServicer(info_service_pb2_grpc.InfoServiceServicer):
    """Tells about model and server. Method names and meaning: info_service.proto."""

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        registry: Registry,
        supervisor: Supervisor,
        status: StatusReader,
        asked: Sequence[SettingMsg],
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._supervisor = supervisor
        self._status = status
        self._asked = {setting.name: setting for setting in asked}

    @guarded
    async def GetModel(self, request: _pb.GetModelRequest, context: CallContext) -> _pb.GetModelResponse:  # noqa: N802, ARG002 - gRPC's signature
        """The model."""
        model = self._lifecycle.model()
        return convert.model_response(model.card, has_chat_template=model.chat is not None)

    @guarded
    async def GetServer(self, request: _pb.GetServerRequest, context: CallContext) -> _pb.GetServerResponse:  # noqa: N802, ARG002 - gRPC's signature
        """The server; also while it starts."""
        status = msgspec.structs.asdict(self._status.read())
        return _pb.GetServerResponse(
            version=importlib.metadata.version("chairlift"),
            state=SHOWN[self._lifecycle.state],
            worker_pids=self._supervisor.pids,
            config=convert.settings(self._settings()),
            statistics=convert.statistics(
                {name: value for name, value in status.items() if name not in _NOT_STATISTICS},
                requests_held=len(self._registry),
            ),
        )

    def _settings(self) -> list[SettingMsg]:
        """What was asked, replaced by what the worker made of it as soon as that is known."""
        resolved = {setting.name: setting for setting in self._lifecycle.worker_settings}
        return list({**self._asked, **resolved}.values())
