"""Cancellation by name."""

from __future__ import annotations

from chairlift.v1 import generation_service_pb2

from chairlift_service.requests.registry import Registry, is_live
from chairlift_service.requests.worker_port import WorkerPort


class Canceller:
    """Ends live requests and lets results go. Needs no room in the queue and waits for nothing."""

    def __init__(self, *, registry: Registry, port: WorkerPort) -> None:
        self._registry = registry
        self._port = port

    def cancel(self, request_id: str, *, unwanted: bool = False) -> generation_service_pb2.CancelStatus:
        """Cancels the request of this id; says what that did.

        The result of a live one is kept, for its reader to come, unless it is `unwanted`.
        """
        generation = self._registry.find(request_id)
        if generation is None:
            if self._registry.departed.was_kept(request_id) is not None:
                return generation_service_pb2.CANCEL_STATUS_ALREADY_FINISHED
            return generation_service_pb2.CANCEL_STATUS_NOT_FOUND
        going_on = [choice for choice in generation.choices if choice.ending is None]
        if going_on:
            generation.unwanted = generation.unwanted or unwanted
            for choice in going_on:
                choice.cancelled = True
                self._port.cancel(choice.uid)
            return generation_service_pb2.CANCEL_STATUS_CANCELLED
        if not is_live(self._registry, generation):
            self._registry.let_go(generation)
        else:  # the worker has not confirmed its ending yet
            generation.unwanted = True
        return generation_service_pb2.CANCEL_STATUS_ALREADY_FINISHED
