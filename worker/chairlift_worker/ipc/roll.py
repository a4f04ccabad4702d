"""Who is in the batch: the worker writes it before each step, the service reads it once the worker is gone.

```
uint64 [ n | uid ... ] [ n | uid ... ]     one part for each step that may be in flight, by step number
```
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

from chairlift_worker.ipc.memory import SharedMemory

ROLL_BYTES: Final = 64 * 1024
MAX_STEPS: Final = 2  # in flight
_PART: Final = ROLL_BYTES // 8 // MAX_STEPS
MAX_UIDS: Final = _PART - 1  # of a step; more are left out


def create_roll() -> SharedMemory:
    """A roll that names nobody."""
    return SharedMemory.create(name="chairlift-roll", size=ROLL_BYTES)


class RollWriter:
    """The worker's side. ValueError where the memory is no roll."""

    def __init__(self, *, memory: SharedMemory) -> None:
        self._view = _view(memory)

    def note(self, step: int, uids: Iterable[int], *, depth: int) -> None:
        """These are in a step that is about to run; `depth` is the number of steps that may be in flight.

        They stand there until a step with the same place is noted, so that whoever is computed all the time always
        stands somewhere.
        """
        first = step % depth * _PART
        some = array("Q", uids)[:MAX_UIDS]
        self._view[first] = 0  # who dies between these lines names nobody
        self._view[first + 1 : first + 1 + len(some)] = some
        self._view[first] = len(some)

    def close(self) -> None:
        """Lets the memory go."""
        self._view.release()


class RollReader:
    """The service's side. ValueError where the memory is no roll."""

    def __init__(self, *, memory: SharedMemory) -> None:
        self._view = _view(memory)

    def read(self) -> frozenset[int]:
        """Who was in a step when the worker last said so. Whatever the memory holds."""
        uids: set[int] = set()
        for first in range(0, MAX_STEPS * _PART, _PART):
            uids.update(self._view[first + 1 : first + 1 + min(self._view[first], MAX_UIDS)])
        return frozenset(uids)

    def close(self) -> None:
        """Lets the memory go."""
        self._view.release()


def _view(memory: SharedMemory) -> memoryview:
    if memory.size != ROLL_BYTES:
        raise ValueError("the memory holds no roll of this version")
    return memory.view().cast("Q")
