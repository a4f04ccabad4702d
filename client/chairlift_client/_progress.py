"""A progress bar of one line, for terminals only."""

from __future__ import annotations

import time
from typing import Final, Self, TextIO

_WIDTH: Final = 30
_INTERVAL: Final = 0.1  # seconds between redraws


class Progress:
    """Counts to `total` on `stream`; draws nothing unless that is a terminal. A context manager."""

    def __init__(self, *, total: int, stream: TextIO | None, unit: str = "requests") -> None:
        self._total = total
        self._unit = unit
        self._stream = stream if stream is not None and stream.isatty() else None
        self._done = 0
        self._began = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._stream is not None:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()

    def advance(self, note: str = "") -> None:
        """One more is done."""
        self._done += 1
        if time.monotonic() - self._drawn >= _INTERVAL:
            self._draw(note)

    def _draw(self, note: str = "") -> None:
        if self._stream is None:
            return
        self._drawn = time.monotonic()
        filled = _WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        elapsed = self._drawn - self._began
        self._stream.write(f"\r[{bar}] {self._done}/{self._total} {self._unit} {elapsed:.1f} s {note}\x1b[K")
        self._stream.flush()
