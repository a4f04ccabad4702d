"""What holds a request back whose reader does not keep up with it."""

from __future__ import annotations

from chairlift_service.requests.cursor import Cursor
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.worker_port import WorkerPort


class Brake:
    """Has the worker give a request no tokens while a reader has its buffer full of it.

    A reader's buffer of a request is what the log has beyond its cursor. A request may have two readers, its own and
    its session's: it is held as long as one of them is full.
    """

    def __init__(self, *, port: WorkerPort, buffer_tokens: int, patience_s: float) -> None:
        self._port = port
        self._buffer_tokens = buffer_tokens
        self.patience_s = patience_s  # how long a reader may be full

    def is_full(self, cursor: Cursor) -> bool:
        """Whether the reader has too much before it."""
        return cursor.num_unread >= self._buffer_tokens

    def is_relieved(self, cursor: Cursor) -> bool:
        """Whether a reader that was full has taken so much that it is worth going on: half."""
        return cursor.num_unread <= self._buffer_tokens // 2

    def hold(self, generation: Generation) -> None:
        """One reader more is full of it."""
        generation.num_full += 1
        if generation.num_full == 1:
            self._tell(generation, held=True)

    def release(self, generation: Generation) -> None:
        """One reader less is full of it."""
        generation.num_full -= 1
        if generation.num_full == 0:
            self._tell(generation, held=False)

    def _tell(self, generation: Generation, *, held: bool) -> None:
        if generation.ending is None:
            self._port.hold(generation.uid, held=held)
