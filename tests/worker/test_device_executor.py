"""Steps on a device's queues that lag behind each other: the same outputs, and no wait is one too many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from chairlift_worker.device_executor import DeviceExecutor
from chairlift_worker.ipc.messages import EndingReason, ProcessorsMsg, SamplingMsg
from chairlift_worker.queues import Mark
from chairlift_worker.runner.replay import _Replay
from support.engine import LIMITS, Rig, Shape, loaded
from support.lagging import LaggingMark, LaggingQueue
from support.tiny_models import tiny_model
from support.workloads import GREEDY, Job, captured, random_ids

SEEDS = range(12)  # how queues lag
# Eight requests that grow into each other's way, over and over: copies there and back beside steps in flight.
SHAPE = Shape(
    num_sectors=16,
    swap_slots=200,
    depth=2,
    max_blocks_per_request=64,
    limits=replace(LIMITS, max_prefill_chunk=16),
    passes=captured(varlen=True, decode=True),
)
SEEDED = SamplingMsg(temperature=1.0, top_k=40, top_p=0.9, min_p=0.0, seed=7)
# What the device does not sample: the host does, and looks at tokens that the device has sampled before.
PENALISED = SamplingMsg(
    temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=8, processors=ProcessorsMsg(frequency_penalty=1.5)
)
JOBS = [
    Job(prompt=random_ids(5 + number, number), max_new_tokens=24, sampling=sampling)
    for number, sampling in enumerate([GREEDY, SEEDED, GREEDY, PENALISED] * 2)
]
LANES = ("compute", "inputs", "copies", "results")


def outputs(shape: Shape, *, faults: str = "") -> tuple[list[list[int]], Rig]:
    rig = Rig(loaded(tiny_model("llama")), shape, faults=faults)
    for uid, job in enumerate(JOBS, start=1):
        rig.add(job.message(uid, rig.now))
    try:
        rig.run()
    finally:
        rig.close()
    return [rig.outcomes[uid].ids for uid in range(1, len(JOBS) + 1)], rig


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Without any queue, a step at a time, in a cache that holds them all."""
    ids, rig = outputs(replace(SHAPE, num_sectors=200, depth=1, passes=Shape().passes))
    assert rig.roster.counters.preemptions_swap == 0
    return ids


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_are_those_of_steps_that_wait_for_each_other(expected: list[list[int]], depth: int) -> None:
    for seed in SEEDS[:6]:
        ids, rig = outputs(replace(SHAPE, lag=seed, depth=depth))
        assert ids == expected, f"seed {seed}"
        assert rig.roster.counters.preemptions_swap > 5
        rig.assert_idle()


WAITS = [
    ("compute", "inputs"),  # for the batch
    ("compute", "copies"),  # for what is copied back, and before what leaves is written over
    ("copies", "compute"),  # for what a step still writes
    ("results", "compute"),  # for the tokens
]


@pytest.fixture
def no_pass_without_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code that is given the tables of another batch may read what is nobody's: it is not let go so far."""
    send, run, sent = _Replay.send, _Replay.run, []

    def sending(ready: _Replay) -> None:
        send(ready)
        sent.append(ready)

    def running(ready: _Replay, tokens=None):
        assert any(other is ready for other in sent), "the batch is not there"
        return run(ready, tokens)

    monkeypatch.setattr(_Replay, "send", sending)
    monkeypatch.setattr(_Replay, "run", running)


@pytest.mark.usefixtures("no_pass_without_its_batch")
@pytest.mark.parametrize(("waiting", "awaited"), WAITS)
def test_without_any_of_the_waits_outputs_are_wrong(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, waiting: str, awaited: str
) -> None:
    wait: Callable[[LaggingQueue, Mark], None] = LaggingQueue.after

    def after(queue: LaggingQueue, mark: Mark) -> None:
        assert isinstance(mark, LaggingMark)
        lanes = queue.clockwork.lanes
        if (LANES[lanes.index(queue)], LANES[lanes.index(mark.queue)]) != (waiting, awaited):
            wait(queue, mark)

    monkeypatch.setattr(LaggingQueue, "after", after)
    wrong = 0
    for seed in SEEDS:
        try:
            ids, _ = outputs(replace(SHAPE, lag=seed))
        except (AssertionError, IndexError, RuntimeError):
            wrong += 1
        else:
            wrong += ids != expected
        if wrong:
            return
    raise AssertionError("nothing went wrong: the wait is not needed, or these workloads do not show why")


def test_copies_go_on_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried = 0
    copy = DeviceExecutor._copy

    def counted(executor: DeviceExecutor, plan) -> None:
        nonlocal unhurried
        marks: list[Mark] = []
        copies = executor._queues.copies
        monkeypatch.setattr(copies, "after", lambda mark: (marks.append(mark), LaggingQueue.after(copies, mark)))
        copy(executor, plan)
        unhurried += bool(plan.moves.outs or plan.moves.ins) and not marks

    monkeypatch.setattr(DeviceExecutor, "_copy", counted)
    outputs(replace(SHAPE, lag=1))
    assert unhurried > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_without_memory_is_computed_in_pieces(expected: list[list[int]], depth: int) -> None:
    ids, _ = outputs(replace(SHAPE, lag=3, depth=depth), faults="memory:6:2")
    assert ids == expected


def test_a_row_that_fails_hurts_nobody_else(expected: list[list[int]]) -> None:
    ids, rig = outputs(replace(SHAPE, lag=3), faults="nan:2:5,sample:4:3")
    for uid, (got, whole) in enumerate(zip(ids, expected, strict=True), start=1):
        cut = {2: 5, 4: 3}.get(uid, len(whole))
        assert got == whole[:cut]
        ending = rig.outcomes[uid].ending
        assert ending is not None
        assert (ending.reason is EndingReason.ERROR) == (uid in {2, 4})
