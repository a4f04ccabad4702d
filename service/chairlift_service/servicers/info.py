"""InfoService."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections.abc import Sequence
from typing import Final

from chairlift.v1 import info_service_pb2, info_service_pb2_grpc
from chairlift_worker.ipc.messages import SettingMsg

from chairlift_service import convert, errors
from chairlift_service.errors import Reason, ServiceError, Violation
from chairlift_service.lifecycle import Lifecycle
from chairlift_service.servicers.edge import CallContext, guarded
from chairlift_service.statistics import ServerStatistics
from chairlift_service.workers.succession import Succession

_pb = info_service_pb2

DEFAULT_INTERVAL_MS: Final = 1000
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 50, 3_600_000
"""Between two messages of WatchStats."""


class InfoServicer(info_service_pb2_grpc.InfoServiceServicer):
    """Tells about model and server. Method names and meaning: info_service.proto."""

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        succession: Succession,
        statistics: ServerStatistics,
        asked: Sequence[SettingMsg],
    ) -> None:
        self._lifecycle = lifecycle
        self._succession = succession
        self._statistics = statistics
        self._asked = {setting.name: setting for setting in asked}

    @guarded
    async def GetModel(self, request: _pb.GetModelRequest, context: CallContext) -> _pb.GetModelResponse:  # noqa: N802, ARG002 - gRPC's signature
        """The model."""
        model = self._lifecycle.model()
        return convert.model_response(model.card, has_chat_template=model.chat is not None)

    @guarded
    async def GetServer(self, request: _pb.GetServerRequest, context: CallContext) -> _pb.GetServerResponse:  # noqa: N802, ARG002 - gRPC's signature
        """The server; also while it starts."""
        return _pb.GetServerResponse(
            version=importlib.metadata.version("chairlift"),
            state=self._lifecycle.shown,
            worker_pids=self._succession.pids,
            config=convert.settings(self._settings()),
            statistics=self._statistics.read(),
        )

    @guarded
    async def WatchStats(self, request: _pb.WatchStatsRequest, context: CallContext) -> None:  # noqa: N802 - gRPC's name
        """The statistics, now and at every interval."""
        interval_ms = request.interval.ToMilliseconds() if request.HasField("interval") else DEFAULT_INTERVAL_MS
        if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
            text = f"is {interval_ms} ms; from {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS} ms are possible"
            raise errors.from_violations([Violation("interval", text, Reason.INVALID_VALUE)])
        ended = self._statistics.ended
        while not ended.is_set():
            response = _pb.WatchStatsResponse(state=self._lifecycle.shown, statistics=self._statistics.read())
            response.uptime.FromNanoseconds(self._statistics.uptime_ns)
            await context.write(response)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), interval_ms / 1000)
        raise ServiceError(Reason.SHUTTING_DOWN, "the service ends")

    def _settings(self) -> list[SettingMsg]:
        """What was asked, replaced by what the worker made of it as soon as that is known."""
        resolved = {setting.name: setting for setting in self._lifecycle.worker_settings}
        return list({**self._asked, **resolved}.values())
