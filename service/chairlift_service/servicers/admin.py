"""AdminService."""

from __future__ import annotations

from chairlift.v1 import admin_service_pb2, admin_service_pb2_grpc

from chairlift_service.lifecycle import Lifecycle
from chairlift_service.link import Link
from chairlift_service.servicers.edge import CallContext, guarded

_pb = admin_service_pb2


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Acts on the worker. Method names and meaning: admin_service.proto."""

    def __init__(self, *, lifecycle: Lifecycle, link: Link) -> None:
        self._lifecycle = lifecycle
        self._link = link

    @guarded
    async def FlushPrefixCache(  # noqa: N802 - gRPC's name
        self,
        request: _pb.FlushPrefixCacheRequest,  # noqa: ARG002 - gRPC's signature
        context: CallContext,  # noqa: ARG002 - gRPC's signature
    ) -> _pb.FlushPrefixCacheResponse:
        """Forgets cached pages."""
        self._lifecycle.model()
        return _pb.FlushPrefixCacheResponse(num_blocks=await self._link.flush_prefix_cache())
