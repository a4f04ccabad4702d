"""A call's ownership of the requests that it added."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from chairlift_service.requests.generation import Generation
from chairlift_service.requests.registry import Registry
from chairlift_service.requests.worker_port import WorkerPort


class Lease:
    """Ends what it owns when the block is left, however that comes about.

    Closing sends one Cancel for each generation that the worker has not confirmed as over. The registry keeps the
    entry until it does. Closing again does nothing.
    """

    __slots__ = ("_port", "_registry", "generations")

    def __init__(self, *, generations: Sequence[Generation], registry: Registry, port: WorkerPort) -> None:
        self.generations: tuple[Generation, ...] = tuple(generations)
        self._registry = registry
        self._port = port

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is still live."""
        generations, self.generations = self.generations, ()
        for generation in generations:
            if self._registry.live(generation.uid) is not None:
                generation.left = True
                self._port.cancel(generation.uid)
