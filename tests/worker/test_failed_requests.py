"""What a failed request leaves behind: nothing that anybody could find. Over a device that computes hashes."""

from __future__ import annotations

import pytest
from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.plan import StepResult, failed_row
from chairlift_worker.request import RequestState
from chairlift_worker.speculation.speculator import DraftLimits
from support.fake_device import solo_run
from support.scheduling import Bench

PROMPT = list(range(18))  # four whole pages and a half
OTHER = list(range(100, 118))


def expect_nothing_found(bench: Bench, prompt: list[int], *, uid: int = 90) -> None:
    """The same prompt, and the same with what came of it, are computed from their first token on."""
    assert not bench.memory.index._by_key
    for number, text in enumerate((prompt, prompt + solo_run(prompt, max_new_tokens=8)), start=uid):
        bench.memory.flush()
        bench.add(number, text, 6)
        bench.run()
        assert bench.started[number].cached_tokens == 0
        assert bench.outputs[number] == solo_run(text, max_new_tokens=6)


def test_pages_that_a_failed_request_published_in_earlier_steps_are_not_found_again() -> None:
    bench = Bench(limits={"max_prefill_chunk": 4})
    bench.device.fail_at[1] = 3
    bench.add(1, PROMPT, 9)
    bench.step()
    bench.step()
    assert bench.memory.index.has_page(bench.roster.active[1].table.sectors[0][0]), "nothing was published yet"
    bench.run()
    assert bench.endings[1].reason is EndingReason.ERROR
    assert bench.outputs[1] == solo_run(PROMPT, max_new_tokens=3)
    assert bench.memory.pool.num_free == bench.memory.pool.num_pages
    expect_nothing_found(bench, PROMPT)
    bench.assert_idle()


@pytest.mark.parametrize("num_right", range(4))
def test_pages_published_by_tokens_of_the_step_that_failed_are_not_found_again(num_right: int) -> None:
    """Drafts that hold bring tokens, and may fill a page, before the place that fails."""
    bench = Bench(drafts=DraftLimits(num_tokens=4, min_len=1, max_len=3), vocab_size=2)
    prompt = [0, 1, 1, 0, 1, 0, 0, 1]
    bench.add(1, prompt, 60)
    while not (bench.plans and bench.plans[-1].rows and bench.plans[-1].rows[0].drafts):
        bench.step()
    failing = bench.device.fail_at[1] = len(bench.outputs[1]) + num_right
    bench.run()
    assert bench.endings[1].reason is EndingReason.ERROR
    assert bench.outputs[1] == solo_run(prompt, max_new_tokens=failing, vocab_size=2)
    assert not bench.memory.index._by_key
    bench.assert_idle()


@pytest.mark.parametrize("swap_slots", [0, 50])
def test_a_request_that_lost_its_pages_while_the_failing_step_was_in_flight_leaves_none_to_be_found(
    swap_slots: int,
) -> None:
    bench = Bench(depth=2, swap_slots=swap_slots)
    bench.add(1, PROMPT, 9)
    while len(bench.outputs[1]) < 3:
        bench.step()
    request = bench.roster.active[1]
    assert bench._in_flight
    bench.roster.preempt(request, bench.now)
    assert request.state is (RequestState.SWAPPED if swap_slots else RequestState.WAITING)
    assert bench.memory.pool.num_kept == 5
    plan = bench._in_flight.pop(0)
    failed = failed_row(1, "NUMERICAL_ERROR: made to fail")
    bench.scheduler.apply(plan, StepResult(step=plan.step, rows=(failed,)), bench.now)
    bench.roster.check()
    bench.run()
    assert bench.endings[1].reason is EndingReason.ERROR
    expect_nothing_found(bench, PROMPT)
    bench.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_shares_the_failed_ones_pages_goes_on_with_them(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add(1, [*PROMPT, 1], 20)
    while len(bench.outputs[1]) < 3:
        bench.step()
    bench.add(2, [*PROMPT, 2], 20)
    while len(bench.outputs[2]) < 3:
        bench.step()
    assert bench.started[2].cached_tokens == 16
    bench.device.fail_at[1] = len(bench.outputs[1]) + 2
    bench.run()
    assert bench.endings[1].reason is EndingReason.ERROR
    assert bench.outputs[2] == solo_run([*PROMPT, 2], max_new_tokens=20)
    bench.add(3, [*PROMPT, 3], 4)
    bench.run()
    assert bench.started[3].cached_tokens == 0, "of a prefix that a failed request looked at too, nothing is found"
    assert bench.outputs[3] == solo_run([*PROMPT, 3], max_new_tokens=4)
    bench.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_for_a_prefix_that_a_failing_request_computes_computes_it_then(depth: int) -> None:
    bench = Bench(depth=depth, limits={"max_prefill_chunk": 6})
    bench.device.fail_at[1] = 0
    bench.add(1, PROMPT, 9)
    bench.add(2, PROMPT, 9)
    bench.run()
    assert bench.endings[1].reason is EndingReason.ERROR
    assert bench.outputs == {1: [], 2: solo_run(PROMPT, max_new_tokens=9)}
    bench.assert_idle()


@pytest.mark.parametrize("num_steps", range(1, 5))
@pytest.mark.parametrize("ended_by", [EndingReason.CANCELLED, EndingReason.DEADLINE, EndingReason.ERROR])
@pytest.mark.parametrize("depth", [1, 2])
def test_pages_that_were_being_written_when_their_request_ended_are_never_shared(
    depth: int, ended_by: EndingReason, num_steps: int
) -> None:
    """However it ends: whoever comes next finds pages of steps that are done, and of no others."""
    bench = Bench(depth=depth, limits={"max_prefill_chunk": 6})
    bench.add(1, PROMPT, 9, deadline_ns=num_steps + 2 if ended_by is EndingReason.DEADLINE else 0)
    if ended_by is EndingReason.ERROR:
        bench.device.fail_at[1] = 0
    for _ in range(num_steps):
        bench.step()
    if ended_by is EndingReason.CANCELLED:
        bench.roster.cancel(1, bench.now)
    in_flight = sum(plan.num_tokens for plan in bench._in_flight)
    done = sum(plan.num_tokens for plan in bench.plans) - in_flight
    bench.add(2, PROMPT, 9)
    bench.run()
    assert bench.endings[1].reason is ended_by
    assert bench.outputs[2] == solo_run(PROMPT, max_new_tokens=9)
    assert bench.started[2].cached_tokens <= done // 4 * 4
    bench.assert_idle()


def test_a_row_that_does_not_sample_can_fail_as_well() -> None:
    bench = Bench(limits={"max_prefill_chunk": 4})
    bench.add(1, PROMPT, 9)
    bench.add(2, OTHER, 9)
    bench.step()
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    result = bench.device.execute(plan, {})
    failed = failed_row(1, "INTERNAL: made to fail")
    bench.scheduler.apply(plan, StepResult(step=plan.step, rows=(failed, *result.rows)), bench.now)
    bench.roster.check()
    bench.run()
    assert bench.endings[1].error == "INTERNAL: made to fail"
    assert bench.outputs[2] == solo_run(OTHER, max_new_tokens=9)
    bench.assert_idle()
