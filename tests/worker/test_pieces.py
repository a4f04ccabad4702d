"""Steps in pieces: what they are, and when they are made."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import pytest
import torch
from chairlift_worker.faults import Faults
from chairlift_worker.pieces import CAREFUL_STEPS, NO_MEMORY, Pieces
from chairlift_worker.plan import Moves, PromptSpan, RowPlan, SampleSpec, StepPlan, in_pieces
from chairlift_worker.runner import StepTimes
from chairlift_worker.sampling import Sampler
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

VOCAB = 40


def spec(index: int) -> SampleSpec:
    return SampleSpec(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=index, logprob=False)


def row(uid: int, num_tokens: int = 1, *, start: int = 5, samples: bool = True, **changes: object) -> RowPlan:
    tokens = array("i", range(start + num_tokens))
    sample = spec(uid) if samples else None
    return RowPlan(uid=uid, tokens=tokens, start=start, num_tokens=num_tokens, tables=(), sample=sample, **changes)


def drafted(uid: int, drafts: tuple[int, ...]) -> RowPlan:
    return row(uid, 1 + len(drafts), drafts=drafts)


def plan_of(*rows: RowPlan, step: int = 1) -> StepPlan:
    return StepPlan(step=step, rows=tuple(sorted(rows, key=lambda each: each.num_tokens > 1)))


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = []
    for uid in range(draw(st.integers(1, 6))):
        num_tokens = draw(st.sampled_from([1, 1, 1, 2, 3, 8, 20]))
        if num_tokens in {2, 3} and draw(st.booleans()):
            rows.append(drafted(uid, tuple(range(num_tokens - 1))))
        else:
            samples = draw(st.booleans())
            rows.append(row(uid, num_tokens, samples=samples, carry=samples and draw(st.booleans())))
    return plan_of(*rows)


@given(plans(), st.integers(1, 30))
def test_pieces_are_the_step_and_nothing_else(plan: StepPlan, max_tokens: int) -> None:
    pieces = in_pieces(plan, max_tokens)
    parts: dict[int, list[RowPlan]] = {}
    for piece in pieces:
        assert piece.step == plan.step
        assert piece.rows
        assert piece.num_tokens <= max_tokens or any(part.drafts for part in piece.rows)
        assert [part.num_tokens > 1 for part in piece.rows] == sorted(part.num_tokens > 1 for part in piece.rows)
        assert len({part.uid for part in piece.rows}) == len(piece.rows)
        for part in piece.rows:
            parts.setdefault(part.uid, []).append(part)
    for whole in plan.rows:
        *before, last = parts.pop(whole.uid)
        position = whole.start
        for part in (*before, last):
            assert part.start == position
            assert (part.tokens, part.tables) == (whole.tokens, whole.tables)
            position += part.num_tokens
        assert position == whole.start + whole.num_tokens
        assert all(part.sample is None and not part.carry and not part.drafts for part in before)
        assert (last.sample, last.carry, last.drafts) == (whole.sample, whole.carry, whole.drafts)
    assert not parts


def test_a_step_that_is_small_enough_is_its_own_piece_moves_and_all() -> None:
    plan = StepPlan(step=1, rows=(row(1), row(2, 4)), moves=Moves(outs=((1, 2),), ins=()))
    assert in_pieces(plan, 5) == [plan]
    assert [piece.moves.outs for piece in in_pieces(plan, 4)] == [(), ()]


class SmallRunner:
    """A runner that has memory for few tokens, and none at all for some requests. Token of uid u at index i: u + i."""

    def __init__(self, *, max_tokens: int, too_large: frozenset[int] = frozenset(), error: type = MemoryError) -> None:
        self.max_tokens = max_tokens
        self.too_large = too_large
        self.error = error
        self.last_times = StepTimes(build_ns=1, forward_ns=10)
        self.tried: list[int] = []
        self.computed: dict[int, list[int]] = {}  # positions, by uid

    def forward(self, plan: StepPlan, carried: Mapping[int, int]) -> torch.Tensor:
        self.tried.append(plan.num_tokens)
        if plan.num_tokens > self.max_tokens or any(each.uid in self.too_large for each in plan.rows):
            raise self.error("no memory")
        for each in plan.rows:
            self.computed.setdefault(each.uid, []).extend(range(each.start, each.start + each.num_tokens))
        wanted: list[int] = []
        for each in plan.rows:
            if each.scored is not None:
                wanted += range(each.scored.index, each.scored.index + each.scored.num_tokens)
            if each.sample is not None:
                wanted += [each.sample.index + each.uid + number for number in range(each.num_sampled)]
        return torch.nn.functional.one_hot(torch.tensor(wanted, dtype=torch.int64), VOCAB).float()


def pieces_over(runner: SmallRunner, faults: str = "") -> Pieces:
    return Pieces(runner=runner, sampler=Sampler(), faults=Faults(faults))


STEP = plan_of(row(1), row(2), drafted(3, (7, 9)), row(4, 60), row(5, 90, samples=False), row(6, 30))
# Token of uid u is 2 * u, for the index is u; of the third the first draft holds, and the second does not.
TOKENS = [(1, 2), (2, 4), (3, 6), (4, 8), (6, 12)]


def told(results: object) -> list[tuple[int, int | str]]:
    return [(each.uid, each.error or each.token_id) for each in results]


@pytest.mark.parametrize("max_tokens", [93, 94, 140, 184, 185, 186])
def test_a_step_that_finds_no_memory_is_computed_in_two_and_brings_the_same(max_tokens: int) -> None:
    runner = SmallRunner(max_tokens=max_tokens)
    pieces = pieces_over(runner)
    with capture_logs() as logs:
        assert told(pieces.compute(STEP, {})) == TOKENS
    positions = {each.uid: list(range(each.start, each.start + each.num_tokens)) for each in STEP.rows}
    assert runner.computed == positions
    assert runner.tried == ([185] if max_tokens >= 185 else [185, 93, 92])
    assert len(logs) == (max_tokens < 185)
    assert pieces.last_times.forward_ns == 10 * (1 if max_tokens >= 185 else 2)


@pytest.mark.parametrize("max_tokens", [1, 4, 7, 20, 21])
def test_a_prompt_that_is_judged_in_pieces_is_judged_whole_and_goes_on(max_tokens: int) -> None:
    span = PromptSpan(index=6, num_tokens=19, num_top=0)
    plan = plan_of(row(4, 20, scored=span), row(5))
    results = pieces_over(SmallRunner(max_tokens=max_tokens)).compute(plan, {})
    assert told(each for each in results if each.prompt is None) == [(5, 10), (4, 8)]
    judged = [each.prompt for each in results if each.prompt is not None]
    places = [each.index + i for each in judged for i in range(len(array("f", each.logprobs)))]
    assert places == list(range(6, 25))


def test_steps_stay_small_for_a_while_and_that_is_said_once() -> None:
    runner = SmallRunner(max_tokens=93)
    pieces = pieces_over(runner)
    with capture_logs() as logs:
        for _ in range(1 + CAREFUL_STEPS):
            assert told(pieces.compute(STEP, {})) == TOKENS
    assert runner.tried == [185] + [93, 92] * (1 + CAREFUL_STEPS)
    assert [(entry["log_level"], entry["tokens_at_most"]) for entry in logs] == [("warning", 93)]
    runner.tried.clear()
    assert told(pieces.compute(STEP, {})) == TOKENS
    assert runner.tried == [185, 93, 92], "not tried again"


def test_where_memory_gets_shorter_still_pieces_get_smaller_still() -> None:
    runner = SmallRunner(max_tokens=93)
    pieces = pieces_over(runner)
    with capture_logs() as logs:
        pieces.compute(STEP, {})
        runner.max_tokens, runner.tried = 47, []
        assert told(pieces.compute(STEP, {})) == TOKENS
        assert runner.tried == [93, 47, 46, 92, 46, 46]
        runner.max_tokens = 1
        assert told(pieces.compute(plan_of(row(1), row(4, 6), step=2), {})) == [(1, 2), (4, 8)]
    assert [entry["tokens_at_most"] for entry in logs] == [93, 47, 16]


@pytest.mark.parametrize("uid", [1, 3, 4, 5, 6])
def test_who_finds_no_memory_alone_fails_alone(uid: int) -> None:
    runner = SmallRunner(max_tokens=100, too_large=frozenset({uid}))
    pieces = pieces_over(runner)
    with capture_logs() as logs:
        results = told(pieces.compute(STEP, {}))
    assert sorted(results) == sorted([*(each for each in TOKENS if each[0] != uid), (uid, NO_MEMORY)], key=str)
    assert uid not in runner.computed
    assert len(logs) == 1
    runner.tried.clear()
    assert told(pieces.compute(plan_of(*(each for each in STEP.rows if each.uid != uid)), {})) == [
        each for each in TOKENS if each[0] != uid
    ]
    assert max(runner.tried) >= 16, "the others are not to suffer for it"


def test_a_small_step_that_found_no_memory_makes_no_others_small() -> None:
    runner = SmallRunner(max_tokens=100)
    pieces = pieces_over(runner, "memory:1")
    assert told(pieces.compute(plan_of(row(1)), {})) == [(1, 2)]
    runner.tried.clear()
    assert len(told(pieces.compute(plan_of(*(row(uid) for uid in range(1, 12)), step=2), {}))) == 11
    assert runner.tried == [11]


def test_where_there_is_no_memory_at_all_every_request_of_the_step_fails_and_the_next_step_is_another() -> None:
    runner = SmallRunner(max_tokens=100)
    pieces = pieces_over(runner, "memory:1:1000")
    assert told(pieces.compute(STEP, {})) == [(uid, NO_MEMORY) for uid in range(1, 7)]
    assert runner.computed == {}
    assert told(pieces.compute(plan_of(row(7), step=2), {})) == [(7, 14)]


def test_a_step_of_one_token_is_tried_once_more() -> None:
    runner = SmallRunner(max_tokens=100)
    pieces = pieces_over(runner, "memory:1,memory:2:2")
    assert told(pieces.compute(plan_of(row(1)), {})) == [(1, 2)]
    assert told(pieces.compute(plan_of(row(1), step=2), {})) == [(1, NO_MEMORY)]
    assert NO_MEMORY.startswith("INTERNAL: ")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_devices_say_it_in_their_own_way(error: type) -> None:
    runner = SmallRunner(max_tokens=93, error=error)
    assert told(pieces_over(runner).compute(STEP, {})) == TOKENS


def test_what_torch_raises_when_it_gets_no_memory_counts_as_such() -> None:
    runner = SmallRunner(max_tokens=100)
    assert told(pieces_over(runner, "alloc:1").compute(STEP, {})) == TOKENS
    assert runner.tried == [93, 92]


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError])
def test_whatever_else_the_model_raises_passes_through(error: type) -> None:
    runner = SmallRunner(max_tokens=5, error=error)
    with pytest.raises(error):
        pieces_over(runner).compute(STEP, {})
    assert runner.tried == [185]
