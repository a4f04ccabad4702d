"""What the scheduler decides, over a device that computes hashes."""

import pytest
from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.request import Request, RequestState
from support.fake_device import solo_run
from support.scheduling import Bench, add_message


def tokens(start: int, num: int) -> list[int]:
    return list(range(start, start + num))


def test_a_request_generates_what_its_solo_run_does() -> None:
    bench = Bench()
    bench.add(1, tokens(0, 10), 7)
    bench.run()
    assert bench.outputs[1] == solo_run(tokens(0, 10), max_new_tokens=7)
    assert bench.endings[1].reason is EndingReason.LENGTH
    bench.assert_idle()


def test_a_stop_id_ends_the_request_and_is_its_last_token() -> None:
    free_run = solo_run(tokens(0, 5), max_new_tokens=9)
    bench = Bench()
    bench.add(1, tokens(0, 5), 9, stop_ids=(free_run[3],))
    bench.run()
    assert bench.outputs[1] == free_run[: free_run.index(free_run[3]) + 1]
    assert bench.endings[1].reason is EndingReason.STOP


def test_a_finished_request_leaves_at_once_and_a_waiting_one_joins_at_once() -> None:
    bench = Bench(limits={"max_requests_per_batch": 2})
    bench.add(1, tokens(0, 4), 2)
    bench.add(2, tokens(100, 4), 5)
    bench.add(3, tokens(200, 4), 5)
    present = [{row.uid for row in plan.rows} for plan in iter(bench.step, None)]
    assert present[:3] == [{1, 2}, {1, 2}, {2, 3}]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_a_prompt_longer_than_the_chunk_is_split_over_steps(chunk: int) -> None:
    bench = Bench(limits={"max_prefill_chunk": chunk})
    bench.add(1, tokens(0, 33), 3)
    bench.run()
    shares = [plan.rows[0].num_tokens for plan in bench.plans]
    assert shares == [min(chunk, 33 - start) for start in range(0, 33, chunk)] + [1, 1]
    assert bench.outputs[1] == solo_run(tokens(0, 33), max_new_tokens=3)


def test_no_step_has_more_tokens_or_requests_than_allowed() -> None:
    bench = Bench(num_pages=200, limits={"max_batch_tokens": 16, "max_requests_per_batch": 5})
    for uid in range(1, 20):
        bench.add(uid, tokens(100 * uid, uid), 6)
    bench.run()
    assert all(plan.num_tokens <= 16 and len(plan.rows) <= 5 for plan in bench.plans)
    for uid in range(1, 20):
        assert bench.outputs[uid] == solo_run(tokens(100 * uid, uid), max_new_tokens=6)


def test_fifo_serves_decoding_before_part_way_prompts_and_prefill_first_the_other_way_round() -> None:
    shares = {}
    for kind in ("fifo", "prefill_first"):
        bench = Bench(limits={"max_batch_tokens": 8, "max_requests_per_batch": 8, "scheduler_type": kind})
        bench.add(1, tokens(0, 4), 20)
        bench.step()
        bench.add(2, tokens(500, 40), 1)
        bench.step()
        plan = bench.step()
        assert plan is not None
        shares[kind] = {row.uid: row.num_tokens for row in plan.rows}
    assert shares == {"fifo": {1: 1, 2: 7}, "prefill_first": {2: 8}}


def test_rows_of_one_token_come_first_in_a_plan() -> None:
    bench = Bench()
    bench.add(1, tokens(0, 4), 9)
    bench.step()
    bench.add(2, tokens(100, 9), 9)
    bench.add(3, tokens(200, 1), 9)
    plan = bench.step()
    assert plan is not None
    assert [row.num_tokens for row in plan.rows] == [1, 1, 9]


def test_below_the_safety_margin_nothing_new_starts_but_what_is_active_goes_on() -> None:
    bench = Bench(num_pages=10, limits={"safety_margin": 0.5})
    bench.add(1, tokens(0, 22), 8)  # 6 of 10 pages at once
    bench.step()
    bench.add(2, tokens(100, 4), 2)
    while 1 not in bench.endings:
        assert 2 not in bench.started
        bench.step()
    bench.run()
    assert bench.outputs[2] == solo_run(tokens(100, 4), max_new_tokens=2)


def test_the_safety_margin_does_not_hold_back_a_request_when_nothing_else_is_active() -> None:
    bench = Bench(num_pages=4, limits={"safety_margin": 1.0})
    bench.add(1, tokens(0, 12), 5)
    bench.run()
    assert bench.outputs[1] == solo_run(tokens(0, 12), max_new_tokens=5)


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_a_second_run_finds_whole_pages_and_leaves_a_token_to_compute(length: int, cached: int) -> None:
    bench = Bench(page_size=16, limits={"max_prefill_chunk": 16})
    for uid in (1, 2):
        bench.add(uid, tokens(0, length), 20)
        bench.run()
    assert bench.started[1].cached_tokens == 0
    assert bench.started[2].cached_tokens == cached
    assert bench.outputs[1] == bench.outputs[2] == solo_run(tokens(0, length), max_new_tokens=20)
    assert all(row.num_tokens >= 1 for plan in bench.plans for row in plan.rows)


def test_without_sharing_nothing_is_found_again() -> None:
    bench = Bench(sharing=False)
    for uid in (1, 2):
        bench.add(uid, tokens(0, 33), 2)
        bench.run()
    assert bench.started[2].cached_tokens == 0
    assert bench.memory.pool.num_kept == 0


def test_a_common_prefix_that_arrives_many_times_at_once_is_computed_once() -> None:
    bench = Bench(num_pages=400, limits={"max_batch_tokens": 64, "max_requests_per_batch": 32})
    prefix = tokens(0, 128)
    for uid in range(1, 33):
        bench.add(uid, [*prefix, 500 + uid], 3)
    bench.run()
    generated_and_computed = 32 * 2  # the last token is never computed
    assert bench.device.num_computed == 128 + 32 + generated_and_computed
    for uid in range(1, 33):
        assert bench.outputs[uid] == solo_run([*prefix, 500 + uid], max_new_tokens=3)


def test_equal_tokens_after_different_beginnings_are_not_shared() -> None:
    bench = Bench()
    bench.add(1, tokens(0, 4) + tokens(50, 5), 3)
    bench.run()
    bench.add(2, tokens(9, 4) + tokens(50, 5), 3)
    bench.run()
    assert bench.started[2].cached_tokens == 0
    assert bench.outputs[2] == solo_run(tokens(9, 4) + tokens(50, 5), max_new_tokens=3)


def test_a_failed_row_ends_alone_and_its_pages_are_not_found_again() -> None:
    bench = Bench()
    bench.device.fail_at[1] = 0
    bench.add(1, tokens(0, 9), 5)
    bench.add(2, tokens(100, 9), 5)
    bench.run()
    assert bench.endings[1].reason is EndingReason.ERROR
    assert bench.endings[1].error.startswith("POISONED_REQUEST:")
    assert bench.outputs[2] == solo_run(tokens(100, 9), max_new_tokens=5)
    bench.add(3, tokens(0, 9), 5)
    bench.run()
    assert bench.started[3].cached_tokens == 0
    bench.assert_idle()


@pytest.mark.parametrize("after_steps", range(6))
def test_a_cancelled_request_is_gone_at_once_in_every_state(after_steps: int) -> None:
    bench = Bench(limits={"max_prefill_chunk": 4})
    bench.add(1, tokens(0, 14), 50)
    bench.add(2, tokens(100, 6), 8)
    for _ in range(after_steps):
        bench.step()
    before = len(bench.outputs[1])
    bench.roster.cancel(1, bench.now)
    bench.run()
    assert bench.endings[1].reason is EndingReason.CANCELLED
    assert len(bench.outputs[1]) == before
    assert bench.outputs[2] == solo_run(tokens(100, 6), max_new_tokens=8)
    bench.assert_idle()


def test_a_queued_request_that_is_cancelled_is_never_prefilled() -> None:
    bench = Bench(limits={"max_requests_per_batch": 1})
    bench.add(1, tokens(0, 4), 5)
    bench.add(2, tokens(100, 4), 5)
    bench.step()
    bench.roster.cancel(2, bench.now)
    bench.run()
    assert 2 not in bench.started
    assert not any(row.uid == 2 for plan in bench.plans for row in plan.rows)


def test_expired_requests_never_start_or_leave_before_the_next_step() -> None:
    bench = Bench(limits={"max_requests_per_batch": 1})
    bench.add(1, tokens(0, 4), 50, deadline_ns=6)
    bench.add(2, tokens(100, 4), 50, deadline_ns=4)
    bench.run()
    assert {uid: ending.reason for uid, ending in bench.endings.items()} == {
        1: EndingReason.DEADLINE,
        2: EndingReason.DEADLINE,
    }
    assert 2 not in bench.started
    assert len(bench.plans) == 4  # steps at times 2 to 5
    bench.assert_idle()


def test_requests_that_fit_alone_but_not_together_both_finish() -> None:
    bench = Bench(num_pages=4, page_size=16)
    bench.add(1, tokens(0, 40), 20)
    bench.add(2, tokens(100, 40), 20)
    bench.run()
    for uid, start in ((1, 0), (2, 100)):
        assert bench.outputs[uid] == solo_run(tokens(start, 40), max_new_tokens=20)
    bench.assert_idle()


def test_a_request_may_fill_the_cache_to_the_last_slot() -> None:
    bench = Bench(num_pages=4, page_size=16)
    bench.add(1, tokens(0, 60), 5)  # 60 + 5 - 1 = 64 slots
    bench.run()
    assert bench.outputs[1] == solo_run(tokens(0, 60), max_new_tokens=5)


def test_requests_of_most_of_the_cache_with_short_ones_between_all_finish_and_are_preempted_little() -> None:
    bench = Bench(num_pages=20, page_size=4)
    uid = 0
    for _ in range(6):
        uid += 1
        bench.add(uid, tokens(100 * uid, 24), 24)  # 60 % of the cache each, in the end
    for _ in range(60):
        bench.step()
        if uid < 40:
            uid += 1
            bench.add(uid, tokens(100 * uid, 3), 3)
    bench.run()
    for one in range(1, uid + 1):
        long = one <= 6
        assert bench.outputs[one] == solo_run(tokens(100 * one, 24 if long else 3), max_new_tokens=24 if long else 3)
    assert max(ending.preemptions for ending in bench.endings.values()) <= 4
    started = list(bench.started)
    assert started == sorted(started), "start order is arrival order"


def test_every_step_moves_every_batch_on_by_a_token_at_least() -> None:
    bench = Bench(num_pages=6, page_size=4)
    for uid in range(1, 6):
        bench.add(uid, tokens(100 * uid, 10), 12)
    while (plan := bench.step()) is not None:
        assert plan.num_tokens >= 1


def test_a_state_cannot_be_entered_from_the_wrong_one() -> None:
    request = Request(add_message(1, [1]))
    with pytest.raises(ValueError, match="cannot go from WAITING to DECODING"):
        request.become(RequestState.DECODING)
    request.become(RequestState.FINISHED)
    with pytest.raises(ValueError, match="cannot go from FINISHED"):
        request.become(RequestState.WAITING)


def test_timings_add_up_to_the_time_in_the_worker() -> None:
    bench = Bench(limits={"max_prefill_chunk": 4})
    bench.add(1, tokens(0, 10), 3)  # arrival at time 1; steps at 2, 3, 4 (prefill), 5, 6
    bench.run()
    ending = bench.endings[1]
    assert (ending.queued_ns, ending.prefill_ns, ending.decode_ns) == (1, 2, 2)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_request_of_ten_windows_never_holds_more_than_the_windows_pages(chunk: int) -> None:
    """A window of 16 and a step's tokens: of pages of 4, at most so many as touch 15 + chunk tokens in a row."""
    most = -(-(16 + chunk) // 4) + 1
    bench = Bench(num_pages=most, page_size=4, sharing=False, windows=(16,), limits={"max_prefill_chunk": chunk})
    bench.add(1, tokens(0, 160), 160)
    held = []
    while bench.step():
        held.append(bench.memory.pool.num_pages - bench.memory.pool.num_free)
    assert max(held) <= most
    assert bench.outputs[1] == solo_run(tokens(0, 160), max_new_tokens=160, windows=[16])
    assert bench.endings[1].preemptions == 0
    bench.assert_idle()


def test_between_the_chunks_of_a_prompt_pages_go_back_for_others_to_take() -> None:
    bench = Bench(num_pages=7, page_size=4, sharing=False, windows=(8,), limits={"max_prefill_chunk": 4})
    bench.add(1, tokens(0, 100), 2)
    bench.step()
    bench.add(2, tokens(200, 100), 2)  # 200 tokens in a cache of 28: each holds at most 4 pages
    bench.run()
    for uid, start in ((1, 0), (2, 200)):
        assert bench.outputs[uid] == solo_run(tokens(start, 100), max_new_tokens=2, windows=[8])
    assert bench.started[2]
    assert max(len(plan.rows) for plan in bench.plans) == 2, "the two ran together"


def test_mixed_layers_take_what_they_need_of_one_memory() -> None:
    """Full layers keep 100 tokens; the window of 8 keeps 3 or 4 pages. Halves for each would be too small."""
    bench = Bench(num_pages=30, page_size=4, sharing=False, windows=(None, 8), limits={"max_prefill_chunk": 4})
    bench.add(1, tokens(0, 90), 11)
    bench.run()
    assert bench.outputs[1] == solo_run(tokens(0, 90), max_new_tokens=11, windows=[None, 8])
    assert bench.endings[1].preemptions == 0


def test_requests_with_windows_that_fit_alone_but_not_together_both_finish() -> None:
    bench = Bench(num_pages=16, page_size=4, sharing=False, windows=(None, 8), limits={"max_prefill_chunk": 4})
    for uid in (1, 2, 3):
        bench.add(uid, tokens(100 * uid, 10), 36)
    bench.run()
    for uid in (1, 2, 3):
        assert bench.outputs[uid] == solo_run(tokens(100 * uid, 10), max_new_tokens=36, windows=[None, 8])
        assert bench.endings[uid].preemptions <= 4
    assert sum(ending.preemptions for ending in bench.endings.values()) >= 1
    bench.assert_idle()


def test_a_request_of_mixed_layers_may_use_its_whole_capacity() -> None:
    bench = Bench(num_pages=20, page_size=4, sharing=False, windows=(None, 10, 10, 10), limits={"max_prefill_chunk": 7})
    capacity = bench.layout.capacity(num_sectors=20, step_len=7, limit=10_000)
    for uid, prompt_len in enumerate((1, capacity // 2, capacity), start=1):
        bench.add(uid, tokens(1000 * uid, prompt_len), capacity - prompt_len + 1)
        bench.run()
        expected = solo_run(
            tokens(1000 * uid, prompt_len), max_new_tokens=capacity - prompt_len + 1, windows=[None, 10]
        )
        assert bench.outputs[uid] == expected
        assert bench.endings[uid].preemptions == 0
