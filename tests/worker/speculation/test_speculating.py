"""Steps with drafts, over a device that computes hashes of few values, so that it says again what it said."""

from __future__ import annotations

import pytest
from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.speculation.policy import StepCosts
from chairlift_worker.speculation.speculator import DraftLimits
from support.fake_device import solo_run
from support.scheduling import Bench

DRAFTS = DraftLimits(num_tokens=4, min_len=1, max_len=3)
BY_TOKEN = StepCosts(sizes=(1, 2), costs_ns=(1.0, 2.0))
VOCAB = 2
PROMPT = [0, 1, 1, 0, 1, 0, 0, 1]


def bench_of(**changes: object) -> Bench:
    return Bench(**{"drafts": DRAFTS, "vocab_size": VOCAB, **changes})


def alone(prompt: list[int], max_new_tokens: int, **changes: object) -> list[int]:
    return solo_run(prompt, max_new_tokens=max_new_tokens, vocab_size=VOCAB, **changes)


def test_drafts_that_hold_spare_steps_and_change_nothing() -> None:
    bench = bench_of()
    bench.add(1, PROMPT, 40)
    bench.run()
    assert bench.outputs[1] == alone(PROMPT, 40)
    counters = bench.roster.counters
    assert counters.accepted_draft_tokens == 40 - len(bench.plans) > 8
    assert counters.draft_tokens == sum(len(row.drafts) for plan in bench.plans for row in plan.rows)
    assert counters.draft_tokens > counters.accepted_draft_tokens
    assert counters.generated_tokens == 40
    assert counters.computed_tokens == len(PROMPT) + 39 + counters.draft_tokens - counters.accepted_draft_tokens
    bench.assert_idle()


def test_without_a_speculator_no_row_has_drafts() -> None:
    bench = bench_of(drafts=None)
    bench.add(1, PROMPT, 40)
    bench.run()
    assert len(bench.plans) == 40
    assert not any(row.drafts for plan in bench.plans for row in plan.rows)


def test_drafts_that_cost_what_they_bring_are_not_checked() -> None:
    bench = bench_of(costs=BY_TOKEN)
    bench.add(1, PROMPT, 40)
    bench.run()
    assert len(bench.plans) == 40
    assert bench.roster.counters.draft_tokens == 0


def test_a_stop_id_among_drafts_that_hold_ends_the_output_there() -> None:
    found = 0
    for seed in range(40):
        free_run = solo_run(PROMPT, max_new_tokens=40, seed=seed, vocab_size=3)
        stop = free_run[-1]
        bench = bench_of(vocab_size=3)
        bench.add(1, PROMPT, 40, seed=seed, stop_ids=(stop,))
        bench.run()
        assert bench.outputs[1] == free_run[: free_run.index(stop) + 1]
        assert bench.endings[1].reason is EndingReason.STOP
        bench.assert_idle()
        found += stop in bench.plans[-1].rows[0].drafts
    assert found > 3, "the stop was never a draft"


def test_neither_the_step_nor_the_chunk_nor_the_output_gets_longer_than_allowed() -> None:
    bench = bench_of(limits={"max_batch_tokens": 9, "max_prefill_chunk": 3, "max_requests_per_batch": 4})
    for uid in range(1, 7):
        bench.add(uid, PROMPT[:uid], 5 * uid)
    bench.run()
    assert all(plan.num_tokens <= 9 for plan in bench.plans)
    assert max(row.num_tokens for plan in bench.plans for row in plan.rows) == 3
    for uid in range(1, 7):
        assert bench.outputs[uid] == alone(PROMPT[:uid], 5 * uid)
        last = len(PROMPT[:uid]) + 5 * uid - 1  # the last token's keys and values are never needed
        assert max(row.start + row.num_tokens for plan in bench.plans for row in plan.rows if row.uid == uid) <= last


def test_rows_with_drafts_come_behind_those_of_one_token() -> None:
    bench = bench_of(limits={"max_batch_tokens": 6})
    for uid in range(1, 4):
        bench.add(uid, [*PROMPT, uid % 2], 30, seed=uid)
    bench.run()
    sizes = [[row.num_tokens for row in plan.rows] for plan in bench.plans]
    assert any(len(step) > 1 and step[0] == 1 < step[-1] for step in sizes)
    assert all(1 not in step[step.index(max(step)) :] or max(step) == 1 for step in sizes)


def test_drafts_evict_nobody_and_give_back_the_pages_that_they_did_not_need() -> None:
    with_drafts, without = bench_of(num_pages=16), bench_of(num_pages=16, drafts=None)
    for bench in (with_drafts, without):
        bench.add(1, PROMPT, 20)
        bench.add(2, PROMPT[::-1], 20)
    for bench in (with_drafts, without):
        while bench.step() is not None:
            for request in bench.roster.active.values():
                assert len(request.table.sectors[0]) <= -(-request.total // 4)
        assert bench.roster.counters.preemptions_recompute == 0
    assert with_drafts.outputs == without.outputs


def test_where_no_page_is_left_for_drafts_the_step_goes_on_without() -> None:
    bench = bench_of(num_pages=7, page_size=4, sharing=False)
    bench.add(1, PROMPT, 21)  # needs all seven pages in the end
    bench.run()
    assert bench.outputs[1] == alone(PROMPT, 21)
    tight = bench_of(num_pages=8, sharing=False)
    tight.add(1, PROMPT[:4], 12)
    tight.add(2, PROMPT[:4], 12, seed=1)
    tight.run()
    assert tight.outputs == {1: alone(PROMPT[:4], 12), 2: alone(PROMPT[:4], 12, seed=1)}


def test_only_confirmed_tokens_are_shared() -> None:
    bench = bench_of(num_pages=200)
    bench.add(1, PROMPT, 60)
    bench.run()
    output = bench.outputs[1]
    for uid, cut in enumerate(range(4, 60, 7), start=2):
        bench.add(uid, [*PROMPT, *output[:cut]], 3)
        bench.run()
        assert bench.outputs[uid] == alone([*PROMPT, *output[:cut]], 3)
        assert bench.endings[uid].cached_tokens >= (len(PROMPT) + cut - 1) // 4 * 4


@pytest.mark.parametrize("windows", [(6,), (None, 3), (1,)])
def test_windows_leave_nothing_behind_that_a_token_taken_back_still_needs(windows: tuple[int | None, ...]) -> None:
    bench = bench_of(windows=windows, sharing=False)
    bench.add(1, PROMPT, 60)
    bench.run()
    assert bench.outputs[1] == alone(PROMPT, 60, windows=[group.window for group in bench.layout.groups])
    assert bench.roster.counters.accepted_draft_tokens > 5
    bench.assert_idle()


@pytest.mark.parametrize("place", range(4))
def test_a_fault_at_any_place_ends_the_request_alone(place: int) -> None:
    bench = bench_of()
    bench.add(1, PROMPT, 40)
    bench.add(2, PROMPT[::-1], 40)
    while not any(row.drafts for plan in bench.plans for row in plan.rows):
        bench.step()
    failing = bench.device.fail_at[1] = len(bench.outputs[1]) + place
    bench.run()
    assert bench.endings[1].reason is EndingReason.ERROR
    assert bench.outputs[1] == alone(PROMPT, 40)[:failing]
    assert bench.outputs[2] == alone(PROMPT[::-1], 40)
    bench.assert_idle()


def test_a_request_evicted_between_steps_with_drafts_goes_on_as_before() -> None:
    for swap_slots in (0, 50):
        bench = bench_of(num_pages=10, swap_slots=swap_slots, sharing=False)
        bench.add(1, PROMPT, 28)
        bench.add(2, PROMPT[::-1], 28)
        bench.run()
        counters = bench.roster.counters
        assert (counters.preemptions_swap if swap_slots else counters.preemptions_recompute) >= 1
        assert bench.outputs == {1: alone(PROMPT, 28), 2: alone(PROMPT[::-1], 28)}
        bench.assert_idle()
