"""Standing still and taking other weights, between the steps of a scheduler over the fake device."""

from __future__ import annotations

import threading
import time

import pytest
from chairlift_worker.control import Control
from chairlift_worker.ipc.messages import (
    DoneMsg,
    EndingReason,
    FlushedMsg,
    FlushPrefixCacheMsg,
    PauseMsg,
    ResumeMsg,
    UpdateWeightsMsg,
    WeightsMsg,
)
from chairlift_worker.model.errors import WeightsError
from chairlift_worker.request import RequestState
from support.fake_device import solo_run
from support.scheduling import Bench

NUM_TENSORS = 5


class HeldWeights:
    """Takes its time until `go`, then does what it was told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.folders: list[str] = []
        self._error = error

    def update(self, folder: str) -> int:
        assert self.go.wait(10)
        if self._error is not None:
            raise self._error
        self.folders.append(folder)
        return NUM_TENSORS


def update(bench: Bench, weights: HeldWeights) -> tuple[Control, WeightsMsg]:
    """Pauses and updates; the answer."""
    control = Control(roster=bench.roster, weights=weights)
    assert control.handle(PauseMsg(op=1)) == DoneMsg(op=1)
    assert control.handle(UpdateWeightsMsg(op=2, folder="/new")) is None
    weights.go.set()
    return control, finished(control)


def finished(control: Control) -> WeightsMsg:
    deadline = time.monotonic() + 10
    while (answer := control.finished()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer


def tokens(start: int, num: int) -> list[int]:
    return list(range(start, start + num))


def test_it_stands_still_from_a_pause_to_a_resume_however_often_they_are_repeated() -> None:
    control = Control(roster=Bench().roster, weights=HeldWeights())
    assert not control.stands_still
    for op in (1, 2):
        assert control.handle(PauseMsg(op=op)) == DoneMsg(op=op)
        assert control.stands_still
    assert control.handle(ResumeMsg(op=3)) == DoneMsg(op=3)
    assert not control.stands_still


def test_weights_are_refused_unless_it_is_paused() -> None:
    weights = HeldWeights()
    answer = Control(roster=Bench().roster, weights=weights).handle(UpdateWeightsMsg(op=7, folder="/new"))
    assert isinstance(answer, WeightsMsg)
    assert answer.op == 7
    assert answer.error.startswith("WRONG_STATE: ")
    assert weights.folders == []


def test_an_update_holds_steps_back_until_it_is_over_even_after_a_resume() -> None:
    weights = HeldWeights()
    control = Control(roster=Bench().roster, weights=weights)
    control.handle(PauseMsg(op=1))
    control.handle(UpdateWeightsMsg(op=2, folder="/new"))
    assert control.handle(ResumeMsg(op=3)) == DoneMsg(op=3)
    assert control.is_updating
    assert control.stands_still
    assert control.finished() is None
    weights.go.set()
    assert finished(control) == WeightsMsg(op=2, error="", num_tensors=NUM_TENSORS, num_requests=0, num_pages=0)
    assert not control.stands_still
    assert weights.folders == ["/new"]


def test_what_was_computed_is_given_up_and_the_rest_of_each_answer_comes_from_the_tokens_so_far() -> None:
    bench = Bench(num_pages=64, page_size=4)
    prompts = {uid: tokens(100 * uid, 6 + uid) for uid in (1, 2, 3)}
    for uid, prompt in prompts.items():
        bench.add(uid, prompt, 12)
    for _ in range(5):
        bench.step()
    so_far = {uid: list(bench.outputs[uid]) for uid in prompts}
    assert all(len(ids) == 5 for ids in so_far.values())
    control, answer = update(bench, HeldWeights())
    assert control.stands_still
    assert (answer.error, answer.num_tensors, answer.num_requests) == ("", NUM_TENSORS, 3)
    assert answer.num_pages == sum((len(prompts[uid]) + 4) // 4 for uid in prompts)  # whole pages that were computed
    assert bench.memory.pool.num_free == 64
    bench.roster.check()
    num_plans = len(bench.plans)
    bench.run()
    again = bench.plans[num_plans]
    assert {row.uid: (row.start, row.num_tokens) for row in again.rows} == {
        uid: (0, len(prompt) + 5) for uid, prompt in prompts.items()
    }
    for uid, prompt in prompts.items():
        assert bench.outputs[uid][:5] == so_far[uid]
        assert bench.outputs[uid] == solo_run(prompt, max_new_tokens=12)  # of one device: the same model again
        assert bench.endings[uid].preemptions == 0
    assert bench.roster.counters.preemptions_recompute == 0
    bench.assert_idle()


def test_waiting_and_half_computed_requests_survive_an_update_too() -> None:
    bench = Bench(limits={"max_requests_per_batch": 1, "max_prefill_chunk": 4})
    bench.add(1, tokens(0, 20), 4)
    bench.add(2, tokens(500, 5), 4)
    bench.step()
    request = bench.roster.get(1)
    assert request is not None
    assert (request.state, request.computed) == (RequestState.PREFILLING, 4)
    _, answer = update(bench, HeldWeights())
    assert answer.num_requests == 1
    assert (request.state, request.computed) == (RequestState.WAITING, 0)
    bench.run()
    assert bench.outputs == {
        1: solo_run(tokens(0, 20), max_new_tokens=4),
        2: solo_run(tokens(500, 5), max_new_tokens=4),
    }
    bench.assert_idle()


def test_requests_are_cancelled_and_expire_while_weights_are_read() -> None:
    bench = Bench()
    bench.add(1, tokens(0, 6), 12)
    bench.add(2, tokens(50, 6), 12, deadline_ns=1000)
    bench.step()
    weights = HeldWeights()
    control = Control(roster=bench.roster, weights=weights)
    control.handle(PauseMsg(op=1))
    control.handle(UpdateWeightsMsg(op=2, folder="/new"))
    bench.roster.cancel(1, bench.now)
    bench.roster.expire(2000)
    bench._collect()
    assert {uid: ending.reason for uid, ending in bench.endings.items()} == {
        1: EndingReason.CANCELLED,
        2: EndingReason.DEADLINE,
    }
    weights.go.set()
    assert finished(control).num_requests == 0
    bench.assert_idle()


def test_a_refused_update_leaves_every_request_and_page_where_it_was() -> None:
    bench = Bench()
    bench.add(1, tokens(0, 9), 12)
    for _ in range(3):
        bench.step()
    free, kept = bench.memory.pool.num_free, bench.memory.pool.num_kept
    request = bench.roster.get(1)
    assert request is not None
    computed = request.computed
    control, answer = update(bench, HeldWeights(WeightsError("INVALID_WEIGHTS: /new: no")))
    assert answer == WeightsMsg(op=2, error="INVALID_WEIGHTS: /new: no", num_tensors=0, num_requests=0, num_pages=0)
    assert (bench.memory.pool.num_free, bench.memory.pool.num_kept, request.computed) == (free, kept, computed)
    assert control.stands_still


def test_an_update_that_breaks_off_in_the_middle_ends_the_worker() -> None:
    with pytest.raises(ZeroDivisionError):
        update(Bench(), HeldWeights(ZeroDivisionError()))


def test_prefixes_are_flushed_at_any_time() -> None:
    bench = Bench(page_size=4)
    bench.add(1, tokens(0, 9), 1)
    bench.run()
    control = Control(roster=bench.roster, weights=HeldWeights())
    assert control.handle(FlushPrefixCacheMsg(op=1)) == FlushedMsg(op=1, num_pages=2)
    control.handle(PauseMsg(op=2))
    assert control.handle(FlushPrefixCacheMsg(op=3)) == FlushedMsg(op=3, num_pages=0)
