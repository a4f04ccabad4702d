"""The step loop: receive, plan, execute, apply, emit. The lift that never stops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from chairlift_worker.control import Control
from chairlift_worker.ipc.channel import WorkerChannel
from chairlift_worker.ipc.messages import (
    AddRequestMsg,
    AnswerMsg,
    CancelMsg,
    EndingReason,
    HoldMsg,
    RequestMsg,
    ShutdownMsg,
    WorkerMsg,
    decode_request,
    encode,
)
from chairlift_worker.ipc.status import Phase
from chairlift_worker.pipeline import Steps
from chairlift_worker.request import requests_of
from chairlift_worker.roster import Roster
from chairlift_worker.scheduler import Scheduler

if TYPE_CHECKING:
    from chairlift_worker.constraint.constraints import Constraints, Prepared

# How long the idle loop sleeps at most: the heartbeat of a worker that has nothing to do, or that is paused.
IDLE_WAIT_S: Final = 0.25
# The same while weights are being replaced: how late the end of that may be noticed.
UPDATE_WAIT_S: Final = 0.02
# The same while a grammar is compiled.
PREPARING_WAIT_S: Final = 0.002


class Engine:
    """Owns the loop of one worker. One thread decides everything; only steps in flight may run in another."""

    def __init__(
        self,
        *,
        channel: WorkerChannel,
        roster: Roster,
        scheduler: Scheduler,
        pipeline: Steps,
        control: Control,
        constraints: Constraints | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        on_rest: Callable[[], None] | None = None,
    ) -> None:
        """Without `constraints` no request may have a grammar.

        `on_rest` is called whenever there is nothing to do, at least every `IDLE_WAIT_S`.
        """
        self._channel = channel
        self._roster = roster
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._control = control
        self._constraints = constraints
        self._clock = clock
        self._on_rest = on_rest
        self._steps = 0
        self._busy_ns = 0  # spent on turns that had something to do
        self._stopping = False
        self._books_checked = True

    def run(self) -> None:
        """Steps until it is told to shut down. Raises ServiceGoneError when nobody is left to work for."""
        self._show(Phase.IDLE, planned_tokens=0)
        while not self._stopping:
            began_ns = self._clock()
            if self.turn():
                self._busy_ns += self._clock() - began_ns
            else:
                self._rest()

    def turn(self) -> bool:
        """Takes what came in, begins a step and finishes one; False if there was neither, or none may begin."""
        self._receive()
        self._roster.expire(self._clock())
        plan = None if self._control.stands_still else self._scheduler.plan(self._clock())
        if plan is not None:
            self._steps = plan.step
            self._show(Phase.RUNNING, planned_tokens=plan.num_tokens)
            self._channel.roll.note(plan.step, (row.uid for row in plan.rows), depth=self._pipeline.depth)
            self._pipeline.submit(plan)
            self._books_checked = False
        if self._pipeline and (plan is None or self._pipeline.is_full):
            self._finish_step()
        elif plan is None:
            self._emit()  # endings of requests that were cancelled or expired
            return False
        return True

    def _finish_step(self) -> None:
        """Waits for the oldest step in flight; what it brought is told at once."""
        plan, result = self._pipeline.finish()
        self._scheduler.apply(plan, result, self._clock())
        self._emit()

    def _receive(self) -> None:
        """Takes in every message that is there."""
        while (record := self._channel.requests.receive()) is not None:
            self._handle(decode_request(record))
        self._answer(self._control.finished())
        if self._constraints is not None:
            for prepared in self._constraints.finished():
                self._begin(prepared)
            self._constraints.forget(lambda uid: self._roster.get(uid) is None)

    def _begin(self, prepared: Prepared) -> None:
        """Lets a request start whose grammar is compiled, or ends it."""
        request = self._roster.get(prepared.uid)
        if request is None:
            return
        self._roster.preparing.discard(prepared.uid)
        if prepared.error:
            self._roster.end(request, EndingReason.ERROR, self._clock(), prepared.error)
        elif prepared.is_complete:
            self._roster.end(request, EndingReason.STOP, self._clock())
        else:
            self._roster.waiting.push_again(prepared.uid)

    def _handle(self, message: RequestMsg) -> None:
        match message:
            case AddRequestMsg():
                for request in requests_of(message):
                    if message.grammar and self._constraints is not None:
                        self._constraints.begin(request.params)
                        self._roster.preparing.add(request.uid)
                    self._roster.add(request)
            case CancelMsg():
                self._roster.cancel(message.uid, self._clock())
            case HoldMsg():
                self._roster.hold(message.uid, held=message.held)
            case ShutdownMsg():
                self._stopping = True
            case _:
                while self._pipeline:  # what operators ask for is done between steps
                    self._finish_step()
                self._answer(self._control.handle(message))

    def _answer(self, answer: AnswerMsg | None) -> None:
        if answer is not None:
            self._show_rest()  # first, so that whoever hears the answer sees the figures as they are
            self._send(answer)

    def _emit(self) -> None:
        """Tells the service what happened since the last time, in one message where the ring takes it."""
        for message in self._roster.outbox.take(self._steps):
            self._send(message)

    def _send(self, message: WorkerMsg) -> None:
        self._channel.send_result(encode(message), heartbeat=self._channel.status.beat)

    def _rest(self) -> None:
        """Sleeps until something comes in or expires. Checks all books once, in the first quiet moment."""
        self._show_rest()
        if self._on_rest is not None:
            self._on_rest()
        wait_s = UPDATE_WAIT_S if self._control.is_updating else IDLE_WAIT_S
        if self._constraints is not None and self._constraints.is_preparing:
            wait_s = PREPARING_WAIT_S
        if self._stopping or self._channel.wait_for_request(wait_s) or self._books_checked:
            return
        self._roster.check()
        self._books_checked = True

    def _show_rest(self) -> None:
        self._show(Phase.PAUSED if self._control.stands_still else Phase.IDLE, planned_tokens=0)

    def _show(self, phase: Phase, *, planned_tokens: int) -> None:
        """Writes the status page: the heartbeat that says the loop is alive, and the figures."""
        pool, counters = self._roster.memory.pool, self._roster.counters
        self._channel.status.set(
            phase=phase,
            step=self._steps,
            steps=self._steps,
            planned_tokens=planned_tokens,
            requests_waiting=len(self._roster.waiting) - self._roster.num_swapped,
            requests_swapped=self._roster.num_swapped,
            swap_blocks_used=self._roster.swap.pool.num_used,
            swap_blocks_total=self._roster.swap.pool.num_slots,
            busy_ns=self._busy_ns,
            requests_running=len(self._roster.active),
            blocks_total=pool.num_pages,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_kept,
            generated_tokens=counters.generated_tokens,
            computed_tokens=counters.computed_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            draft_tokens=counters.draft_tokens,
            accepted_draft_tokens=counters.accepted_draft_tokens,
            preemptions_recompute=counters.preemptions_recompute,
            preemptions_swap=counters.preemptions_swap,
        )
