"""What rank 0 tells makes the other ranks compute the same batch."""

from __future__ import annotations

from array import array

import msgspec
import torch
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.attention.metadata import PageRows
from chairlift_worker.distributed.messages import (
    RankBeatMsg,
    RankEndMsg,
    RankMovesMsg,
    RankReadyMsg,
    RankStepMsg,
    RankWeightsMsg,
    decode,
    encode,
    step_message,
    step_plan,
)
from chairlift_worker.kv.layout import make_layout
from chairlift_worker.plan import Moves, PromptSpan, RowPlan, SampleSpec, StepPlan
from chairlift_worker.runner.batch import BatchBuilder

FULL = LayerFacts(num_kv_heads=2, head_dim=8, sliding_window=None)
SLIDING = LayerFacts(num_kv_heads=2, head_dim=8, sliding_window=6)
LAYOUT = make_layout([FULL, SLIDING], page_size=4)
SPEC = SampleSpec(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, seed=5, index=2, logprob=True)


def row(
    uid: int, start: int, num_tokens: int, *, samples: bool = True, carry: bool = False, drafts: tuple[int, ...] = ()
) -> RowPlan:
    """A row of a request that has more tokens and pages than the row looks at; what its window left is gone."""
    known = start + num_tokens - len(drafts) - carry
    tokens = array("i", [100 * uid + place for place in range(known + (0 if carry or drafts else 3))])
    end = start + num_tokens
    tables = []
    for group in LAYOUT.groups:
        table = array("i", [uid * 10 + place for place in range(group.sectors_for(end) + 1)])
        for place in range(group.first_needed(start)):
            table[place] = -1
        tables.append(table)
    return RowPlan(
        uid=uid,
        tokens=tokens,
        start=start,
        num_tokens=num_tokens,
        tables=tuple(tables),
        sample=SPEC if samples else None,
        carry=carry,
        drafts=drafts,
    )


def test_another_rank_makes_the_same_batch_of_it() -> None:
    plan = StepPlan(
        step=9,
        rows=(
            row(1, 17, 1),
            row(2, 3, 1, carry=True),
            row(3, 0, 1),
            row(4, 0, 7),
            row(5, 12, 5, samples=False),
            row(6, 20, 4, drafts=(7, 8, 9)),
            msgspec.structs.replace(row(7, 2, 9), scored=PromptSpan(index=4, num_tokens=5, num_top=2)),
        ),
    )
    carried = {2: 77}
    message = decode(encode(step_message(plan, carried, sector_lens=tuple(g.sector_len for g in LAYOUT.groups))))
    assert isinstance(message, RankStepMsg)
    told = step_plan(message)
    assert told.step == 9
    builder = BatchBuilder(layout=LAYOUT, num_sectors=90, device=torch.device("cpu"), form="pages")
    ours, theirs = builder.build(plan, carried), builder.build(told)
    for name in ("input_ids", "position_ids", "sampled"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.input_ids[0].tolist()[:3] == [117, 77, 300]
    for one, other in zip(ours.metadata, theirs.metadata, strict=True):
        assert isinstance(one, PageRows)
        assert isinstance(other, PageRows)
        assert one.window == other.window
        assert torch.equal(one.first, other.first)
        assert torch.equal(one.start, other.start)
        assert torch.equal(one.tables, other.tables)


def test_a_row_that_could_not_be_sampled_carries_token_0_to_all_ranks() -> None:
    plan = StepPlan(step=1, rows=(row(2, 3, 1, carry=True),))
    message = step_message(plan, {2: -1}, sector_lens=tuple(group.sector_len for group in LAYOUT.groups))
    assert step_plan(message).rows[0].tokens[3] == 0


def test_everything_else_comes_as_it_was_sent() -> None:
    moves = RankMovesMsg(moves=Moves(outs=((1, 2), (3, 4)), ins=((5, 6),), copies=((7, 8),)))
    for message in (moves, RankWeightsMsg(folder="/a"), RankReadyMsg(timeout_s=None), RankBeatMsg(), RankEndMsg()):
        assert decode(encode(message)) == message
