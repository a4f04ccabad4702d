"""A worker's parts stepped in this process, without service, rings or gRPC in the way."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator

from chairlift_worker.assemble import build
from chairlift_worker.ipc.channel import ServiceChannel, WorkerChannel
from chairlift_worker.ipc.messages import NO_DEADLINE, AddRequestMsg, SamplingMsg, encode
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.request import Request

PARTS = ("plan", "build", "forward", "sample", "apply", "emit")


def some_prompt(uid: int, length: int) -> list[int]:
    """Ids that no other request has."""
    return [(uid * 7919 + i * 104_729) % 40_000 for i in range(length)]


def request_of(uid: int, prompt: list[int], max_new_tokens: int) -> AddRequestMsg:
    """A greedy request that only its length ends."""
    return AddRequestMsg(
        uid=uid,
        prompt=array("i", prompt).tobytes(),
        max_new_tokens=max_new_tokens,
        sampling=SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        stop_ids=(),
        logprobs=False,
        arrival_ns=0,
        deadline_ns=NO_DEADLINE,
    )


class Driver:
    """Steps a worker's parts one by one, as the engine does, with a clock between them."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._service = ServiceChannel.create()
        self._channel = WorkerChannel.attach(self._service.description, duplicate=True)
        self._parts = build(settings, self._channel)
        self._uid = 0

    def fill(self, *, rows: int, context: int, steps: int) -> None:
        """Requests that decode for so many steps."""
        for _ in range(rows):
            self.add(some_prompt(self._uid + 1, context), steps)

    def add(self, prompt: list[int], max_new_tokens: int) -> None:
        """One request."""
        self._uid += 1
        self._parts.roster.add(Request(request_of(self._uid, prompt, max_new_tokens)))

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._parts.roster.memory.flush()

    def steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Runs until all requests are over; the query tokens of each step and its times in milliseconds."""
        parts = self._parts
        while True:
            marks = [time.monotonic_ns()]
            plan = parts.scheduler.plan(marks[0])
            if plan is None:
                return
            marks.append(time.monotonic_ns())
            result = parts.executor.execute(plan)
            marks.append(time.monotonic_ns())
            parts.scheduler.apply(plan, result, marks[-1])
            marks.append(time.monotonic_ns())
            for message in parts.roster.outbox.take(plan.step):
                self._channel.results.try_send(encode(message))
            marks.append(time.monotonic_ns())
            while self._service.results.receive() is not None:
                pass
            inside = parts.executor.last_times
            spans = (
                marks[1] - marks[0],
                inside.build_ns,
                inside.forward_ns,
                inside.sample_ns,
                marks[3] - marks[2],
                marks[4] - marks[3],
            )
            yield plan.num_tokens, {name: span / 1e6 for name, span in zip(PARTS, spans, strict=True)}
