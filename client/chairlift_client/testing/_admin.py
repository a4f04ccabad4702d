"""The API's AdminService over a FakeEngine."""

# ruff: noqa: ARG002, N802 # gRPC gives the names and the arguments of these methods

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import grpc
from chairlift.v1 import admin_service_pb2, admin_service_pb2_grpc, event_pb2, info_service_pb2

from chairlift_client.testing._engine import FakeEngine
from chairlift_client.testing._refusals import Refusal

_pb = admin_service_pb2
_SERVING: Final = info_service_pb2.SERVER_STATE_SERVING
_PAUSED: Final = info_service_pb2.SERVER_STATE_PAUSED
_DRAINING: Final = info_service_pb2.SERVER_STATE_DRAINING
_STOPPED: Final = info_service_pb2.SERVER_STATE_STOPPED
_TICK: Final = 0.02  # seconds between looks at whether a caller still waits


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """The states of the real one. The prefix cache is always empty, and other weights have no tensors."""

    def __init__(self, *, engine: FakeEngine) -> None:
        self._engine = engine

    def Pause(self, message: _pb.PauseRequest, context: grpc.ServicerContext) -> _pb.PauseResponse:
        with self._engine.changed:
            self._check({_SERVING}, context)
            self._engine.enter(_PAUSED)
            return _pb.PauseResponse(num_requests=len(self._engine.live()))

    def Resume(self, message: _pb.ResumeRequest, context: grpc.ServicerContext) -> _pb.ResumeResponse:
        with self._engine.changed:
            self._check({_PAUSED, _DRAINING, _STOPPED}, context)
            self._engine.enter(_SERVING)
            return _pb.ResumeResponse()

    def Drain(self, message: _pb.DrainRequest, context: grpc.ServicerContext) -> _pb.DrainResponse:
        with self._engine.changed:
            self._check({_SERVING, _PAUSED, _DRAINING}, context)
            self._engine.enter(_DRAINING)
            while self._engine.live() and context.is_active():
                self._engine.changed.wait(_TICK)
                self._check({_DRAINING}, context)
            return _pb.DrainResponse()

    def Stop(self, message: _pb.StopRequest, context: grpc.ServicerContext) -> _pb.StopResponse:
        with self._engine.changed:
            self._check({_SERVING, _PAUSED, _DRAINING}, context)
            live = self._engine.live()
            status = Refusal(grpc.StatusCode.UNAVAILABLE, "stopped", reason="STOPPED").status
            for request in live:
                request.failure = event_pb2.Failed(status=status)
            self._engine.enter(_STOPPED)
            return _pb.StopResponse(num_requests=len(live))

    def FlushPrefixCache(
        self, message: _pb.FlushPrefixCacheRequest, context: grpc.ServicerContext
    ) -> _pb.FlushPrefixCacheResponse:
        return _pb.FlushPrefixCacheResponse()

    def UpdateWeights(
        self, message: _pb.UpdateWeightsRequest, context: grpc.ServicerContext
    ) -> _pb.UpdateWeightsResponse:
        if not message.path.startswith("/"):
            Refusal.field("path", "must be the absolute path of a folder", reason="INVALID_VALUE").abort(context)
        with self._engine.changed:
            self._check({_PAUSED}, context)
            return _pb.UpdateWeightsResponse(num_requests=len(self._engine.live()))

    def _check(self, allowed: Collection[info_service_pb2.ServerState], context: grpc.ServicerContext) -> None:
        """Refuse the call unless the state is one of these."""
        if self._engine.state not in allowed:
            Refusal(grpc.StatusCode.FAILED_PRECONDITION, "not in this state", reason="WRONG_STATE").abort(context)
