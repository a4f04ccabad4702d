"""Whatever the workload and however small the cache: each request's tokens are those of its solo run."""

from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.speculation.speculator import DraftLimits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_device import VOCAB, solo_judgements, solo_run
from support.layouts import layout_of
from support.scheduling import Bench

PREFIXES = [list(range(base, base + 40)) for base in (0, 0, 300, 600)]

DRAFTS = DraftLimits(num_tokens=5, min_len=1, max_len=3)

# of the layers of made-up models; None is full attention. Sectors hold one block or several, and some are not filled.
MIXED = [(6,), (1,), (None, 6), (None, 1), (None, 3, 9, 9), (None, 5, 5, 5, 5), (None, None, None, 20), (4, 11)]


@st.composite
def workloads(draw: st.DrawFn, *, windows: tuple[int | None, ...] = (None,)) -> tuple[Bench, list[dict]]:
    page_size = draw(st.sampled_from([1, 4, 5, 16]))
    longest = draw(st.integers(2, 60))
    max_batch_tokens = draw(st.sampled_from([1, 2, 7, 16, 64]))
    chunk = draw(st.sampled_from([1, 3, 16, 64]))
    layout = layout_of(*windows, page_size=page_size)
    depth = draw(st.sampled_from([1, 2]))
    drafts = draw(st.sampled_from([None, DRAFTS, DRAFTS])) if depth == 1 else None
    bench = Bench(
        num_pages=layout.peak(0, longest, chunk) + draw(st.sampled_from([0, 1, 3, 50])),
        page_size=page_size,
        sharing=windows == (None,) and draw(st.booleans()),
        windows=windows,
        swap_slots=draw(st.sampled_from([0, 1, 4, 1000])),
        depth=depth,
        pass_tokens=draw(st.sampled_from([None, None, 1, 3, 10])),
        drafts=drafts,
        vocab_size=draw(st.sampled_from([2, 3, 30])) if drafts else VOCAB,
        limits={
            "max_batch_tokens": max_batch_tokens,
            "max_prefill_chunk": chunk,
            "max_requests_per_batch": min(max_batch_tokens, draw(st.integers(1, 12))),
            "scheduler_type": draw(st.sampled_from(["fifo", "prefill_first"])),
            "safety_margin": draw(st.sampled_from([0.0, 0.15, 0.9])),
        },
    )
    requests = []
    for uid in range(1, draw(st.integers(1, 12)) + 1):
        prompt_len = draw(st.integers(1, longest - 1))
        shared = draw(st.integers(0, min(prompt_len, 40)))
        judged = draw(st.sampled_from([False, False, True]))
        prompt = draw(st.sampled_from(PREFIXES))[:shared] + [700 + uid] * (prompt_len - shared)
        requests.append(
            {
                "uid": uid,
                "prompt": prompt,
                "max_new_tokens": draw(st.integers(0 if judged else 1, longest - prompt_len + 1)),
                "judged": judged,
                "forks": draw(st.sampled_from([0, 0, 0, 1, 3])),
                "arrives": draw(st.integers(0, 30)),
                "cancelled": draw(st.one_of(st.none(), st.none(), st.integers(0, 60))),
                "fails": draw(st.sampled_from([None, None, None, 0, 1, 2, 5])),
                "held": draw(st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 30), st.integers(1, 30)))),
                "seed": draw(st.integers(0, 3)),
                "stop_ids": tuple(draw(st.lists(st.integers(0, 999), max_size=30))),
            }
        )
    return bench, requests


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads())
def test_each_request_equals_its_solo_run(workload: tuple[Bench, list[dict]]) -> None:
    run_and_compare(*workload)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.sampled_from(MIXED).flatmap(lambda windows: workloads(windows=windows)))
def test_with_windows_each_request_equals_its_solo_run(workload: tuple[Bench, list[dict]]) -> None:
    run_and_compare(*workload)


def run_and_compare(bench: Bench, requests: list[dict]) -> None:
    by_arrival = sorted(requests, key=lambda request: request["arrives"])
    # Uids are given on arrival; behind each there are those of its forks.
    uids = {request["uid"]: place * 10 for place, request in enumerate(by_arrival, start=1)}
    bench.device.fail_at = {
        uids[request["uid"]]: request["fails"] for request in requests if request["fails"] is not None
    }
    for tick in range(5000):
        for request in by_arrival:
            if request["arrives"] == tick:
                bench.add(
                    uids[request["uid"]],
                    request["prompt"],
                    request["max_new_tokens"],
                    seed=request["seed"],
                    stop_ids=request["stop_ids"],
                    forks=forks_of(uids[request["uid"]], request),
                    prompt_logprobs=int(request["judged"]),
                )
            if request["cancelled"] == tick:  # its forks go on
                bench.roster.cancel(uids[request["uid"]], bench.now)
            if request["held"] is not None:
                first, num_ticks = request["held"]
                if tick in (first, first + num_ticks):
                    bench.roster.hold(uids[request["uid"]], held=tick == first)
        if bench.step() is None and tick > 60:
            break
    for request in requests:
        compare(bench, uids[request["uid"]], request)
        for fork, seed in forks_of(uids[request["uid"]], request):
            compare(bench, fork, {**request, "seed": seed, "fails": None, "held": None, "judged": False})
    counters = bench.roster.counters
    assert 0 <= counters.accepted_draft_tokens <= counters.draft_tokens
    assert counters.generated_tokens == sum(len(output) for output in bench.outputs.values())
    bench.assert_idle()


def forks_of(uid: int, request: dict) -> tuple[tuple[int, int], ...]:
    return tuple((uid + number, request["seed"] + number) for number in range(1, request["forks"] + 1))


def compare(bench: Bench, uid: int, request: dict) -> None:
    expected = solo_run(
        request["prompt"],
        max_new_tokens=request["max_new_tokens"],
        seed=request["seed"],
        stop_ids=frozenset(request["stop_ids"]),
        windows=[group.window for group in bench.layout.groups],
        vocab_size=bench.vocab_size,
    )
    ending = bench.endings[uid]
    if ending.reason is EndingReason.CANCELLED:
        assert bench.outputs[uid] == expected[: len(bench.outputs[uid])]
    elif request["fails"] is not None and request["fails"] < len(expected):
        assert bench.outputs[uid] == expected[: request["fails"]]
        assert ending.reason is EndingReason.ERROR
    else:
        assert bench.outputs[uid] == expected
        stopped = bool(expected) and expected[-1] in request["stop_ids"]
        assert ending.reason is (EndingReason.STOP if stopped else EndingReason.LENGTH)
    windows = [group.window for group in bench.layout.groups]
    judged = solo_judgements(request["prompt"], windows=windows) if request["judged"] else []
    assert bench.judged[uid] == (judged if expected and bench.outputs[uid] else judged[: len(bench.judged[uid])])
    if ending.reason is EndingReason.LENGTH:
        assert bench.judged[uid] == judged
    assert ending.preemptions <= (4 if request["held"] is None else 5)
    assert ending.cached_tokens < len(request["prompt"])
