"""Files that are read again when they change, such as certificates that are renewed under a running service."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


class FileError(Exception):
    """A file that a setting names cannot be used. The text is one line that names both, and nothing of the content."""


class Watched(Generic[_T]):
    """What `read` makes of some files, and makes anew once one of them has changed.

    Where the changed files cannot be used (a certificate was replaced, its key not yet), what held before goes on to
    hold, and the log says so. To look costs one `stat` for each file. Any thread may ask.
    """

    def __init__(self, paths: Sequence[str], *, read: Callable[[], _T]) -> None:
        """Reads. Raises FileError, as `read` does."""
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._look()  # before reading: what changes in between is read again
        self._value = read()

    def current(self) -> _T:
        """What the files say now."""
        with self._lock:
            seen = self._look()
            if seen != self._seen:
                self._seen = seen
                self._read_again()
            return self._value

    def _read_again(self) -> None:
        try:
            self._value = self._read()
        except FileError as error:
            _log.error("changed files cannot be used; what they said before still holds", error=str(error))
        else:
            _log.info("files have changed and were read again", files=self._paths)

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What a change of a file, or of the link that leads to it, also changes."""
        return tuple(_signature(path) for path in self._paths)


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - on every call and every new connection: without a Path for each
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)
