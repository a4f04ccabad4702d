"""Faults made on purpose, for tests. Off unless the setting `fault_injection` names some.

`FAULT[,FAULT...]`, each `[first:|every:]KIND:NUMBER[:NUMBER]`:

| fault          | what happens                                                                               |
|----------------|--------------------------------------------------------------------------------------------|
| forward:N      | the forward pass of step N raises                                                          |
| memory:N[:T]   | the forward pass of step N raises MemoryError, the first T times that it is tried (1)      |
| alloc:N[:T]    | so it does, by torch's own allocator: it is asked for more than any machine has            |
| crash:N        | the process kills itself before step N                                                     |
| hang:N         | step N never ends; there is no sign of life                                                |
| slow_step:N:MS | step N takes MS milliseconds longer                                                        |
| slow:MS        | each pass takes MS milliseconds longer, so that a tiny model is as slow on every machine   |
| sample:U[:I]   | sampling for the service's U-th request raises: for each token, or for token I, from 0     |
| nan:U[:I]      | the same request's logits are not numbers                                                  |
| crash_uid:U    | the process kills itself before each step that the same request is in                      |
| ring_full:T[:R]| before record R (2: the first after the worker is ready) the results ring is full T times  |
| torn:R         | the process kills itself in the midst of record R: it is written, and not published        |

Each worker counts its own steps and records, from 1. What is asked of one of them happens in the service's first worker
alone, all else in every worker that replaces it, too, unless the prefix says otherwise.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, cast

import torch

from chairlift_worker.ipc.ring import Sender
from chairlift_worker.plan import RowPlan, StepPlan


@dataclass(frozen=True, slots=True)
class Kind:
    """What may be said of a fault."""

    every: bool  # whether it holds in every worker
    most: int = 1  # numbers
    least: int = 1
    second: int = 0  # of the numbers, where it is left out


EACH_TOKEN: Final = -1
KINDS: Final = {
    "forward": Kind(every=False),
    "memory": Kind(every=False, most=2, second=1),
    "alloc": Kind(every=False, most=2, second=1),
    "crash": Kind(every=False),
    "hang": Kind(every=False),
    "slow_step": Kind(every=False, most=2, least=2),
    "slow": Kind(every=True),
    "sample": Kind(every=True, most=2, second=EACH_TOKEN),
    "nan": Kind(every=True, most=2, second=EACH_TOKEN),
    "crash_uid": Kind(every=True),
    "ring_full": Kind(every=False, most=2, second=2),
    "torn": Kind(every=False),
}
_PREFIXES: Final = {"first": False, "every": True}
_TOO_MUCH: Final = 2**62  # bytes


class InjectedFaultError(Exception):
    """The fault that was asked for."""


class Faults:
    """Makes the faults of a text, where others ask for them. Raises ValueError for a text that names no faults."""

    def __init__(self, text: str, *, incarnation: int = 1) -> None:
        """`incarnation` counts the service's workers, from 1."""
        self._armed: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
        for part in filter(None, text.split(",")):
            fault = _parse(part)
            if fault is None:
                kinds = ", ".join(KINDS)
                raise ValueError(f"fault_injection = {text!r}: {part!r} is not one of {kinds} with its numbers")
            kind, first, second, every = fault
            if every or incarnation == 1:
                self._armed[kind][first] = second
        self._delay_s = sum(self._armed["slow"]) / 1e3

    def before_forward(self, plan: StepPlan) -> None:
        """Makes the faults of a step, or of a piece of one."""
        step = plan.step
        if self._has("crash", step) or (
            self._armed["crash_uid"] and any(self._has("crash_uid", row.uid) for row in plan.rows)
        ):
            _die()
        while self._has("hang", step):
            time.sleep(60)
        if delay_s := self._delay_s + self._armed["slow_step"].get(step, 0) / 1e3:
            time.sleep(delay_s)
        if self._spend("memory", step):
            raise MemoryError(f"made to fail: memory:{step}")
        if self._spend("alloc", step):
            torch.empty(_TOO_MUCH, dtype=torch.uint8)
        if self._has("forward", step):
            raise InjectedFaultError(f"made to fail: forward:{step}")

    def before_sampling(self, uid: int, index: int) -> None:
        """Raises if sampling this token of this request is to fail."""
        if self._armed["sample"].get(uid) in (EACH_TOKEN, index):
            raise InjectedFaultError(f"made to fail: sample:{uid}")

    def spoil(self, logits: torch.Tensor, rows: Iterable[RowPlan]) -> None:
        """Makes logits of a step, (sampled places, vocabulary), what they are to be."""
        if not self._armed["nan"]:
            return
        place = 0
        for row in rows:
            place += row.num_scored
            for number in range(row.num_sampled):
                assert row.sample is not None, "rows that are not sampled have no places"
                if self._armed["nan"].get(row.uid) in (EACH_TOKEN, row.sample.index + number):
                    with torch.inference_mode():
                        logits[place] = float("nan")
                place += 1

    def wrap(self, sender: Sender) -> Sender:
        """The results ring's end, with the faults that are asked for there; itself where there are none."""
        full, torn = self._armed["ring_full"], self._armed["torn"]
        if not full and not torn:
            return sender
        tries = {record: times for times, record in full.items()}
        return cast("Sender", FaultySender(sender, full=tries, torn=torn.keys()))

    def _has(self, kind: str, number: int) -> bool:
        return number in self._armed[kind]

    def _spend(self, kind: str, number: int) -> bool:
        """Whether a fault that happens several times is still to happen; once less from now on."""
        left = self._armed[kind].get(number, 0)
        if left:
            self._armed[kind][number] = left - 1
        return left > 0


class FaultySender:
    """What the worker needs of a Sender."""

    def __init__(self, sender: Sender, *, full: dict[int, int], torn: Iterable[int]) -> None:
        """`full` has the tries that fail by the number of the record."""
        self._sender = sender
        self._full = full
        self._torn = frozenset(torn)
        self._next = 1  # record

    def try_send(self, record: bytes, *, leave: int = 0) -> bool:
        """As the Sender's."""
        if self._full.get(self._next, 0):
            self._full[self._next] -= 1
            return False
        if self._next in self._torn:
            self._sender.try_send_all(cast("Sequence[bytes]", _then_die(record)))
        sent = self._sender.try_send(record, leave=leave)
        self._next += sent
        return sent


def _parse(part: str) -> tuple[str, int, int, bool] | None:
    """Kind, both numbers, and whether it holds in every worker; None for what is no fault."""
    words = part.split(":")
    prefix = words.pop(0) if words[0] in _PREFIXES else None
    name, *numbers = words or [""]
    kind = KINDS.get(name)
    if kind is None or not kind.least <= len(numbers) <= kind.most:
        return None
    if not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    first, second = [*map(int, numbers), kind.second][:2]
    return name, first, second, kind.every if prefix is None else _PREFIXES[prefix]


def _then_die(record: bytes) -> Iterator[bytes]:
    """Records to be sent at once, of which the process does not live to see the second."""
    yield record
    _die()


def _die() -> NoReturn:
    """At once, as by the kernel when memory is short: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the signal cannot be survived")
