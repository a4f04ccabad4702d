"""What rank 0 tells the others, in MessagePack: one message after the other, by broadcast.

Others learn of a request only what a step needs of it: they neither schedule nor sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Final

import msgspec

from chairlift_worker.plan import Moves, PromptSpan, RowPlan, SampleSpec, StepPlan

_NOBODY: Final = 0  # a uid, of which the service gives none
# That a row samples is all that is looked at.
_SAMPLED: Final = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=0, logprob=False)


class RankRowMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row of a step; see `RowPlan`."""

    tokens: bytes  # int32, native order: the query tokens alone, carried ones and drafts as they are
    start: int
    tables: tuple[bytes, ...]  # int32, native order: one for each group of layers, as far as the row looks
    num_sampled: int
    scored: PromptSpan | None


class RankStepMsg(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """Compute this, with us."""

    step: int
    rows: tuple[RankRowMsg, ...]


class RankMovesMsg(msgspec.Struct, frozen=True, array_like=True, tag="moves", gc=False):
    """Copy these sectors, each rank its part of them."""

    moves: Moves


class RankWeightsMsg(msgspec.Struct, frozen=True, array_like=True, tag="weights", gc=False):
    """Take the weights of this folder, if all ranks can."""

    folder: str


class RankReadyMsg(msgspec.Struct, frozen=True, array_like=True, tag="ready", gc=False):
    """The worker serves from now on, and no rank waits longer than that for another."""

    timeout_s: float | None  # None: there is no bound


class RankBeatMsg(msgspec.Struct, frozen=True, array_like=True, tag="beat", gc=False):
    """There is nothing to do; show that you are there."""


class RankEndMsg(msgspec.Struct, frozen=True, array_like=True, tag="end", gc=False):
    """Exit with code 0."""


RankMsg = RankStepMsg | RankMovesMsg | RankWeightsMsg | RankReadyMsg | RankBeatMsg | RankEndMsg

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankMsg] = msgspec.msgpack.Decoder(RankMsg)


def encode(message: RankMsg) -> bytes:
    """The bytes that are broadcast."""
    return _encoder.encode(message)


def decode(content: bytes) -> RankMsg:
    """The inverse. Raises msgspec.DecodeError on bytes that are no such message."""
    return _decoder.decode(content)


def step_message(plan: StepPlan, carried: Mapping[int, int], *, sector_lens: tuple[int, ...]) -> RankStepMsg:
    """A plan as the others are told it; `sector_lens` are those of the layout's groups."""
    return RankStepMsg(step=plan.step, rows=tuple([_row_message(row, carried, sector_lens) for row in plan.rows]))


def step_plan(message: RankStepMsg) -> StepPlan:
    """The plan that makes another rank compute the same."""
    return StepPlan(step=message.step, rows=tuple([_row_plan(row) for row in message.rows]))


def _row_message(row: RowPlan, carried: Mapping[int, int], sector_lens: tuple[int, ...]) -> RankRowMsg:
    tokens = row.tokens[row.start : row.start + row.num_known - row.carry]
    # A row that could not be sampled carries none: what follows from it will be dropped.
    tokens.extend([max(0, carried[row.uid])] if row.carry else row.drafts)
    end = row.start + row.num_tokens
    tables = [table[: -(-end // length)].tobytes() for table, length in zip(row.tables, sector_lens, strict=True)]
    return RankRowMsg(
        tokens=tokens.tobytes(),
        start=row.start,
        tables=tuple(tables),
        num_sampled=row.num_sampled,
        scored=row.scored,
    )


def _row_plan(row: RankRowMsg) -> RowPlan:
    tokens = array("i", bytes(array("i").itemsize * row.start))  # what stands before is in the cache
    tokens.frombytes(row.tokens)
    tables = tuple([array("i", table) for table in row.tables])
    num_tokens = len(tokens) - row.start
    num_drafts = max(0, row.num_sampled - 1)
    return RowPlan(
        uid=_NOBODY,
        tokens=tokens,
        start=row.start,
        num_tokens=num_tokens,
        tables=tables,
        sample=_SAMPLED if row.num_sampled else None,
        drafts=tuple(tokens[len(tokens) - num_drafts :]),
        scored=row.scored,
    )
