"""The blocking client of the admin address."""

from __future__ import annotations

import os

from chairlift.v1 import admin_service_pb2

from chairlift_client import _convert
from chairlift_client._sync_connection import Connected, call
from chairlift_client._types import WeightsUpdate


class AdminClient(Connected):
    """A blocking connection to a service's admin address (its `--admin-listen`).

    >>> with AdminClient(target) as admin:
    ...     admin.flush_prefix_cache()
    0
    """

    def flush_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Forget the pages of the prefix cache that no request uses. Returns how many pages were forgotten."""
        request = admin_service_pb2.FlushPrefixCacheRequest()
        num_blocks: int = call(self._stubs.admin.FlushPrefixCache, request, timeout=timeout).num_blocks
        return num_blocks

    def pause(self, *, timeout: float | None = None) -> int:
        """Let no step begin until `resume`; returns how many requests stand still. New ones queue."""
        num_requests: int = call(
            self._stubs.admin.Pause, admin_service_pb2.PauseRequest(), timeout=timeout
        ).num_requests
        return num_requests

    def resume(self, *, timeout: float | None = None) -> None:
        """End a pause, a drain or a stop; what stood still goes on where it stood.

        >>> with AdminClient(target) as admin:
        ...     admin.pause()
        ...     admin.resume()
        0
        """
        call(self._stubs.admin.Resume, admin_service_pb2.ResumeRequest(), timeout=timeout)

    def drain(self, *, timeout: float | None = None) -> None:
        """Refuse new requests and wait until what is there has ended. The drain goes on where `timeout` passes."""
        call(self._stubs.admin.Drain, admin_service_pb2.DrainRequest(), timeout=timeout)

    def stop(self, *, timeout: float | None = None) -> int:
        """End every request now, as UNAVAILABLE, and refuse new ones until `resume`; returns how many were ended."""
        num_requests: int = call(self._stubs.admin.Stop, admin_service_pb2.StopRequest(), timeout=timeout).num_requests
        return num_requests

    def update_weights(self, path: str | os.PathLike[str], *, timeout: float | None = None) -> WeightsUpdate:
        """While paused: take the weights of a folder on the service's machine, named by its absolute path.

        What is in flight goes on with them after `resume`. Weights that do not fit raise and change nothing.
        """
        request = admin_service_pb2.UpdateWeightsRequest(path=os.fspath(path))
        return _convert.weights_update(call(self._stubs.admin.UpdateWeights, request, timeout=timeout))
