"""What this package needs of the way to the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chairlift_worker.ipc.messages import AddRequestMsg


class WorkerPort(Protocol):
    """The sending side of the link to the worker."""

    def add(self, messages: Sequence[AddRequestMsg]) -> None:
        """Sends all of them, or none. Raises ServiceError with QUEUE_FULL or WORKER_LOST."""
        ...

    def cancel(self, uid: int) -> None:
        """Sends a Cancel now, or as soon as there is room. Never fails; does nothing once the worker is gone."""
        ...

    def hold(self, uid: int, *, held: bool) -> None:
        """Has the worker hold a request, or go on with it, as soon as there is room. Never fails, as `cancel`."""
        ...
