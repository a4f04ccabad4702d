"""Steps in flight: one, or two where the next step is planned while one runs (`use_async_batching`).

The same plans run either way. With two, a plan may name a token that the step before has yet to sample (`carry`): the
pipeline hands each step's tokens to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from chairlift_worker.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs a plan: copies, forward pass, sampling."""

    def execute(self, plan: StepPlan, carried: Mapping[int, int]) -> StepResult:
        """The plan's result. `carried` has the tokens of the step before, by uid, for rows with `carry`.

        An exception means that the worker cannot go on.
        """
        ...


class Steps(Protocol):
    """Steps in flight, as the loop sees them."""

    depth: int

    def __len__(self) -> int: ...

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be finished before another plan is made."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Begins a step, or runs it. Raises what it raises, now or in `finish`."""
        ...

    def finish(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest step and returns it. Raises what the step raised."""
        ...

    def close(self) -> None:
        """Lets go of what it runs steps with."""
        ...


class Running(Protocol):
    """A step that a device works on."""

    def result(self) -> StepResult:
        """Waits for it. Raises what the step raised."""
        ...


class Launcher(Protocol):
    """Begins steps on a device that works by itself, and keeps their tokens for the next."""

    def begin(self, plan: StepPlan) -> Running:
        """A step in flight."""
        ...


class LaunchedSteps:
    """Steps that a device runs by itself, one after the other: no thread has to wait with each."""

    def __init__(self, *, launcher: Launcher, depth: int) -> None:
        _check(depth)
        self.depth = depth
        self._launcher = launcher
        self._in_flight: deque[tuple[StepPlan, Running]] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def is_full(self) -> bool:
        """See `Steps`."""
        return len(self._in_flight) >= self.depth

    def submit(self, plan: StepPlan) -> None:
        """See `Steps`."""
        self._in_flight.append((plan, self._launcher.begin(plan)))

    def finish(self) -> tuple[StepPlan, StepResult]:
        """See `Steps`."""
        plan, running = self._in_flight.popleft()
        return plan, running.result()

    def close(self) -> None:
        """See `Steps`."""


class Pipeline:
    """Runs steps one after the other, in the order in which they are given.

    With a depth of one a step runs where it is submitted. With two it runs in a thread of its own, the only one that
    uses the model; what is submitted meanwhile follows at once.
    """

    def __init__(self, *, executor: Executor, depth: int) -> None:
        _check(depth)
        self.depth = depth
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward") if depth > 1 else None
        self._in_flight: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._carried: Mapping[int, int] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be finished before another plan is made."""
        return len(self._in_flight) >= self.depth

    def submit(self, plan: StepPlan) -> None:
        """Begins a step, or runs it. Raises what it raises, now or in `finish`."""
        if self._thread is not None:
            future = self._thread.submit(self._run, plan)
        else:
            future = Future()
            future.set_result(self._run(plan))
        self._in_flight.append((plan, future))

    def finish(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest step and returns it. Raises what the step raised."""
        plan, future = self._in_flight.popleft()
        return plan, future.result()

    def close(self) -> None:
        """Ends the thread after what is in flight."""
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, plan: StepPlan) -> StepResult:
        result = self._executor.execute(plan, self._carried)
        self._carried = {row.uid: row.token_id for row in result.rows}
        return result


def _check(depth: int) -> None:
    if depth not in {1, 2}:
        raise ValueError(f"a pipeline of {depth} steps: plans look one step ahead at most")
