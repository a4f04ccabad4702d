"""Queues that run ahead of each other, or lag behind, as far as they may: a missing wait shows in what comes out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from chairlift_worker.queues import Mark, Queues, Work


class Clockwork:
    """All queues of a device. Which one goes on next is drawn at random."""

    def __init__(self, seed: int, *, eagerness: float | None = None) -> None:
        """`eagerness`: how likely work is done before somebody waits for it; None: it is drawn, too."""
        self._random = random.Random(seed)
        self._eagerness = self._random.choice([0.0, 0.3, 0.9]) if eagerness is None else eagerness
        self.lanes: list[LaggingQueue] = []
        self.num_waits = 0  # that held a queue up
        self.num_late = 0  # pieces of work that were done when somebody waited

    def queues(self) -> Queues:
        self.lanes = [LaggingQueue(self) for _ in range(4)]
        return Queues(*self.lanes)

    def given(self) -> None:
        """Something was given to a queue."""
        while self._random.random() < self._eagerness and (ready := self._ready()):
            self._random.choice(ready).step()

    def reach(self, lane: LaggingQueue, count: int) -> None:
        """Goes on until a queue has done so many pieces; what it does not wait for may be left."""
        while lane.num_done < count:
            self.num_late += 1
            others = self._ready()
            needed = lane.needed()
            (needed if self._random.random() < 0.5 else self._random.choice(others)).step()

    def _ready(self) -> list[LaggingQueue]:
        return [lane for lane in self.lanes if lane.is_ready]


class LaggingQueue:
    def __init__(self, clockwork: Clockwork) -> None:
        self.clockwork = clockwork
        self._todo: deque[Work | LaggingMark] = deque()
        self.num_done = 0

    def run(self, work: Callable[[], None]) -> None:
        self._todo.append(work)
        self.clockwork.given()

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, LaggingMark)
        self._todo.append(mark)

    def mark(self) -> LaggingMark:
        return LaggingMark(self, self.num_done + len(self._todo))

    @property
    def is_ready(self) -> bool:
        return bool(self._todo) and (not isinstance(head := self._todo[0], LaggingMark) or head.is_reached)

    def needed(self) -> LaggingQueue:
        """The queue that has to go on, so that this one can."""
        head = self._todo[0]
        if isinstance(head, LaggingMark) and not head.is_reached:
            self.clockwork.num_waits += 1
            return head.queue.needed()
        return self

    def step(self) -> None:
        head = self._todo.popleft()
        self.num_done += 1
        if not isinstance(head, LaggingMark):
            head()

    def wait_for(self, count: int) -> None:
        self.clockwork.reach(self, count)


@dataclass(frozen=True)
class LaggingMark:
    queue: LaggingQueue
    count: int

    @property
    def is_reached(self) -> bool:
        return self.queue.num_done >= self.count

    def wait(self) -> None:
        self.queue.wait_for(self.count)
