"""AdminService."""

# ruff: noqa: ARG002, N802 # gRPC gives the names and the arguments of these methods

from __future__ import annotations

from chairlift.v1 import admin_service_pb2, admin_service_pb2_grpc

from chairlift_service.operations import Operations
from chairlift_service.servicers.edge import CallContext, guarded

_pb = admin_service_pb2


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Hands operators' calls on to `Operations`. Method names and meaning: admin_service.proto."""

    def __init__(self, *, operations: Operations) -> None:
        self._operations = operations

    @guarded
    async def Pause(self, request: _pb.PauseRequest, context: CallContext) -> _pb.PauseResponse:
        """Stands still."""
        return _pb.PauseResponse(num_requests=await self._operations.pause())

    @guarded
    async def Resume(self, request: _pb.ResumeRequest, context: CallContext) -> _pb.ResumeResponse:
        """Goes on."""
        await self._operations.resume()
        return _pb.ResumeResponse()

    @guarded
    async def Drain(self, request: _pb.DrainRequest, context: CallContext) -> _pb.DrainResponse:
        """Lets everything end."""
        await self._operations.drain()
        return _pb.DrainResponse()

    @guarded
    async def Stop(self, request: _pb.StopRequest, context: CallContext) -> _pb.StopResponse:
        """Ends everything."""
        return _pb.StopResponse(num_requests=await self._operations.stop())

    @guarded
    async def FlushPrefixCache(
        self, request: _pb.FlushPrefixCacheRequest, context: CallContext
    ) -> _pb.FlushPrefixCacheResponse:
        """Forgets cached pages."""
        return _pb.FlushPrefixCacheResponse(num_blocks=await self._operations.flush_prefix_cache())

    @guarded
    async def UpdateWeights(self, request: _pb.UpdateWeightsRequest, context: CallContext) -> _pb.UpdateWeightsResponse:
        """Takes other weights."""
        answer = await self._operations.update_weights(request.path)
        return _pb.UpdateWeightsResponse(
            num_tensors=answer.num_tensors, num_requests=answer.num_requests, num_blocks=answer.num_pages
        )
