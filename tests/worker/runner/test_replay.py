"""Steps captured as graphs, on the stand-in: logits, pages, addresses and the number of graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from chairlift_worker.attention.backends import make_backend
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.metadata import PageRows
from chairlift_worker.graph_choice import GraphOptions
from chairlift_worker.pass_config import PassConfig
from chairlift_worker.plan import StepPlan
from chairlift_worker.runner import Padding, make_module_forward
from chairlift_worker.runner.graphs import GraphMisuseError
from chairlift_worker.runner.replay import GraphForward
from support.paged import MAX_BLOCKS, MAX_ROWS, Desk, Sequence, some_ids
from support.passes import PassDesk
from support.tiny_models import reference_logits, tiny_model

TOLERANCE = 1e-4
Q_INTERVAL = 8


def captured(*, varlen: bool = True, decode: bool = True) -> PassConfig:
    return PassConfig(graphs=GraphOptions(varlen=varlen, decode=decode, q_interval=Q_INTERVAL, kv_interval=64))


def desk_with_graphs(kind: str = "llama", *, num_pages: int = 200, num_inputs: int = 1, **switches: bool) -> Desk:
    return PassDesk(tiny_model(kind), captured(**switches), num_pages=num_pages, num_inputs=num_inputs)


def forward_of(desk: Desk) -> GraphForward:
    forward = desk.runner._forward
    assert isinstance(forward, GraphForward)
    return forward


def step_and_compare(desk: Desk, kind: str, *wanted: tuple[Sequence, int]) -> None:
    """One step of so many tokens of each sequence; each row's logits are those of its sequence alone."""
    logits = desk.step(*(sequence.row(size) for sequence, size in wanted))
    for (sequence, _), got in zip(wanted, logits, strict=True):
        expected = reference_logits(tiny_model(kind), sequence.tokens.tolist()[: sequence.computed])[-1]
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_inputs", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
def test_replays_have_the_models_own_logits_in_every_mix_of_shapes(kind: str, num_inputs: int) -> None:
    desk = desk_with_graphs(kind, num_inputs=num_inputs)
    rows = [desk.sequence(some_ids(40, seed=seed)) for seed in range(MAX_ROWS)]
    a, b, c, d, *_ = rows
    step_and_compare(desk, kind, (a, 5))
    step_and_compare(desk, kind, (a, 1), (b, 8))
    step_and_compare(desk, kind, (a, 1), (b, 1), (c, 17), (d, 3))
    for count in (1, 2, 3, 4, 3, 4, 2, 1):
        step_and_compare(desk, kind, *((row, 1) for row in rows[:count]))
    step_and_compare(desk, kind, (b, 1), (a, 5), (rows[4], 20), (rows[5], 9))
    for _ in range(3):
        step_and_compare(desk, kind, *((row, 1) for row in rows))
    assert 0 < forward_of(desk).num_captured <= forward_of(desk).max_captured


def test_a_replay_is_bit_for_bit_the_plain_pass_over_the_padded_batch() -> None:
    desk = desk_with_graphs()
    forward = forward_of(desk)
    seen: list[torch.Tensor] = []
    plain = forward._forward

    def watched(batch):
        seen.append(plain(batch))
        return seen[-1]

    forward._forward = watched
    sequence = desk.sequence(some_ids(30))
    for size in (9, 1, 1, 9):
        logits = desk.step(sequence.row(size))
        assert torch.equal(logits, seen[-1][:1])
        assert len(seen[-1]) > 1 or size == 1


def test_tokens_of_nobody_write_to_no_page_and_read_nothing_stale() -> None:
    """All pages but the sequences' own, and the null one, are NaN before and after; and so is the null one before."""
    desk = desk_with_graphs(num_pages=60)
    sectors = desk.runner.cache.sectors
    a, b = desk.sequence(some_ids(21)), desk.sequence(some_ids(30, seed=1))
    sectors.fill_(float("nan"))
    own = sorted({*a.tables[0], *b.tables[0]})
    others = [number for number in range(desk.runner.cache.num_sectors) if number not in own]
    for sizes in ((13, 5), (1, 9), (1, 1), (5, 1)):
        ordered = sorted(zip((a, b), sizes, strict=True), key=lambda pair: pair[1])
        step_and_compare(desk, "llama", *ordered)
        assert sectors[others].isnan().all()
    for sequence in (a, b):
        for place, sector in enumerate(sequence.tables[0]):
            page = sectors[sector].view(-1, 4, 3, 8)  # units of 4 tokens, 3 heads, 8 wide
            num_written = min(4, max(0, sequence.computed - 4 * place))
            assert page[:, :num_written].isfinite().all()
            assert page[:, num_written:].isnan().all()


@torch.inference_mode()
def test_more_places_may_be_sampled_at_than_there_are_rows() -> None:
    desk = desk_with_graphs()
    forward, ids = forward_of(desk), some_ids(30)
    sequence = desk.sequence(ids)
    for begin, end in ((0, 11), (11, 30)):
        batch = desk.runner._builder.build(StepPlan(step=1, rows=(sequence.row(end - begin),)))
        logits = forward(replace(batch, sampled=torch.arange(end - begin)))
        expected = reference_logits(tiny_model("llama"), ids)[begin:end]
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_a_step_without_sampling_rows_gives_no_logits() -> None:
    desk = desk_with_graphs()
    assert desk.step(desk.sequence(some_ids(9)).row(5, sample=False)).shape == (0, 384)


def test_as_many_graphs_as_shapes_and_never_more_than_said() -> None:
    desk = desk_with_graphs(num_inputs=2)
    forward = forward_of(desk)
    # decode: 1, 2, 4, 6; else tokens 8 ... 520, rows 8, contexts 64 ... 512; each for two sets
    # sampled at 8 places or at as many as there are tokens
    assert forward.max_captured == 2 * (4 + (2 * 65 - 1) * 8)
    rows = [desk.sequence(some_ids(40, seed=seed)) for seed in range(MAX_ROWS)]
    for row in rows:
        desk.step(row.row(5))
    assert forward.num_captured == 2, "one shape, two sets"
    for count in (3, 4, 3, 4):
        desk.step(*(row.row(1) for row in rows[:count]))
    assert forward.num_captured == 4


def test_each_path_has_a_switch_of_its_own() -> None:
    for switches, expected in (({"varlen": False}, 1), ({"decode": False}, 1), ({}, 2)):
        desk = desk_with_graphs(**switches)
        sequence = desk.sequence(some_ids(9))
        step_and_compare(desk, "llama", (sequence, 5))
        step_and_compare(desk, "llama", (sequence, 1))
        assert desk.runner.steps_by_path == {"varlen": 1, "decode": 1}
        assert forward_of(desk).num_captured == expected


def test_a_steps_inputs_stay_as_they_are_while_the_next_step_is_written() -> None:
    """With two sets, what a step was given is still there when the next one is under way, and then gives way."""
    desk = desk_with_graphs(num_inputs=2)
    forward = forward_of(desk)
    given = []
    plain = forward._forward

    def watched(batch):
        rows = batch.metadata[0]
        assert isinstance(rows, PageRows)
        tensors = [batch.input_ids, batch.position_ids, batch.sampled, rows.first, rows.start, rows.tables]
        for tensors_before, values_before in given[-1:]:
            assert all(torch.equal(now, then) for now, then in zip(tensors_before, values_before, strict=True))
        given.append((tensors, [tensor.clone() for tensor in tensors]))
        return plain(batch)

    forward._forward = watched
    rows = [desk.sequence(some_ids(40, seed=seed)) for seed in range(4)]
    for row in rows:
        desk.step(row.row(5))
    for count in (4, 3, 2, 4, 1):
        desk.step(*(row.row(1) for row in rows[:count]))
    addresses = [tensors[0].data_ptr() for tensors, _ in given]
    assert len(set(addresses)) == 2
    assert all(a != b for a, b in itertools.pairwise(addresses))


def test_logits_outlive_the_next_replay() -> None:
    desk = desk_with_graphs()
    a, b = desk.sequence(some_ids(9)), desk.sequence(some_ids(9, seed=1))
    first = desk.step(a.row(9))
    before = first.clone()
    desk.step(b.row(9))
    assert torch.equal(first, before)


def test_weights_that_moved_are_noticed() -> None:
    desk = desk_with_graphs()
    a = desk.sequence(some_ids(20))
    desk.step(a.row(5))
    desk.step(a.row(5))
    forward = forward_of(desk)
    forward._fixed = [tensor.clone() for tensor in forward._fixed]
    with pytest.raises(GraphMisuseError):
        desk.step(a.row(5))


def test_batches_of_the_fast_path_have_room_for_the_longest_rows() -> None:
    desk = desk_with_graphs()
    longest = 4 * MAX_BLOCKS
    a, b = desk.sequence(some_ids(longest)), desk.sequence(some_ids(longest, seed=1))
    desk.step(a.row(longest - 1), b.row(longest - 2))
    step_and_compare(desk, "llama", (a, 1), (b, 1))
    assert desk.runner.steps_by_path["decode"] == 1


def test_backends_that_take_slots_cannot_be_captured() -> None:
    desk = Desk(tiny_model("llama"))
    cache = PagedCache(layout=desk.layout, num_sectors=4, dtype=torch.float32)
    padding = Padding(q_interval=8, kv_interval=64, max_tokens=8, max_rows=2, max_context_len=64)
    with pytest.raises(ValueError, match="graphs need tables of pages"):
        make_module_forward(
            model=desk.model.module, backend=make_backend("sdpa"), cache=cache, passes=captured(), padding=padding
        )
