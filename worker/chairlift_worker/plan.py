"""The seam of the worker: what the scheduler decides (`StepPlan`) and what the step brought (`StepResult`).

Both are data. The scheduler makes plans and applies results and never sees a tensor; the runner and the sampler turn
a plan into a result and never see a request.

What is made for each row of each step is a msgspec struct: a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from chairlift_worker.ipc.messages import ProcessorsMsg, PromptLogprobsMsg

NOTHING_CARRIED: Final[Mapping[int, int]] = MappingProxyType({})


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How to choose the next token of one row; a pure function of this, the row's logits and its tokens so far."""

    temperature: float  # 0 is greedy
    top_k: int  # 0 is off
    top_p: float  # 1 is off
    min_p: float  # 0 is off
    seed: int  # unsigned, 64 bits
    index: int  # of the token to sample in the output, from 0
    logprob: bool  # report the token's log-probability
    num_top: int = 0  # with `logprob`: likeliest tokens to report besides
    raw: bool = False  # both by the model's own logits
    processors: ProcessorsMsg | None = None
    constrained: bool = False  # to tokens that the request's grammar allows


class PromptSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of a prompt whose log-probabilities are wanted: those at positions [index, index + num_tokens).

    Each is judged by the logits at the place before it, so the places are [index - 1, index + num_tokens - 1).
    """

    index: int  # at least 1
    num_tokens: int
    num_top: int  # likeliest tokens to report besides; 0: none


class RowPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step: query tokens at positions [start, start + num_tokens).

    | range                      | what                                                         |
    |----------------------------|--------------------------------------------------------------|
    | [0, start)                 | keys and values are in the cache, through `tables`           |
    | [start, start+num_tokens)  | computed in this step; keys and values written to `tables`   |

    The last tokens may be `drafts`, guesses of what the output will be: logits are wanted at the last known token and
    at each draft, and the drafts hold as far as they are what is sampled before them. With `scored` logits are wanted
    at the places of that span, too; all of them are the row's own, and come before those that are sampled at.

    `tables` has one table for each group of layers (kv/layout.py): to a group whose sectors hold n tokens, position p
    is the token p % n of sector table[p // n]. Groups with a window look at positions > start - window only; earlier
    entries may be -1. `tokens` and `tables` are the request's own arrays, read only for the runner: while a plan that
    names them is in flight they grow at the end, and entries that the plan does not look at become -1.
    """

    uid: int
    tokens: array[int]  # int32; the row's tokens are tokens[start : start + num_tokens], but for the drafts
    start: int
    num_tokens: int  # at least 1, drafts included
    tables: tuple[array[int], ...]  # int32 each; at least ceil((start + num_tokens) / n) entries
    sample: SampleSpec | None  # None: the row does not reach its last token, no logits are needed
    carry: bool = False  # the row's last token is the one that the step before samples for the same uid
    drafts: tuple[int, ...] = ()  # of a row that samples, and does not carry
    scored: PromptSpan | None = None

    @property
    def num_known(self) -> int:
        """Query tokens that are no drafts."""
        return self.num_tokens - len(self.drafts)

    @property
    def num_sampled(self) -> int:
        """Places at its end that are sampled at."""
        return 0 if self.sample is None else 1 + len(self.drafts)

    @property
    def num_scored(self) -> int:
        """Places whose logits judge a token of the prompt."""
        return 0 if self.scored is None else self.scored.num_tokens

    @property
    def num_wanted(self) -> int:
        """Places whose logits are wanted: first those of the prompt, then those that are sampled at."""
        return self.num_scored + self.num_sampled

    def known_tokens(self, carried: Mapping[int, int]) -> array[int]:
        """A copy of the request's tokens up to the row's last one that is no draft; `carried` has those by uid.

        A row that could not be sampled carries none: what follows from it will be dropped.
        """
        tokens = self.tokens[: self.start + self.num_known - self.carry]
        if self.carry:
            tokens.append(max(0, carried[self.uid]))
        return tokens


@dataclass(frozen=True, slots=True)
class Moves:
    """Sectors to copy before the forward pass: first all of `outs`, then all of `ins` and `copies`, in any order.

    What `copies` read and write is not among what `ins` write.
    """

    outs: tuple[tuple[int, int], ...]  # (sector, slot of the swap pool)
    ins: tuple[tuple[int, int], ...]  # (slot of the swap pool, sector)
    copies: tuple[tuple[int, int], ...] = ()  # (sector, sector)


NO_MOVES: Final = Moves(outs=(), ins=())


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to run in one forward pass. Rows with one token come before the others."""

    step: int
    rows: tuple[RowPlan, ...]
    moves: Moves = NO_MOVES

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return sum(row.num_tokens for row in self.rows)


def in_pieces(plan: StepPlan, max_tokens: int) -> list[StepPlan]:
    """The step as several, of `max_tokens` each at most, that bring the same one after the other.

    Longer rows are cut; drafts stay with their row, however many they are. The moves are left out: they come before
    the first piece.
    """
    if plan.num_tokens <= max_tokens:
        return [plan]
    pieces: list[list[RowPlan]] = [[]]
    room = max_tokens
    for row in plan.rows:
        rest: RowPlan | None = row
        while rest is not None:
            if pieces[-1] and (room <= 0 or (rest.drafts and rest.num_tokens > room)):
                pieces.append([])
                room = max_tokens
            part, rest = _cut(rest, room)
            pieces[-1].append(part)
            room -= part.num_tokens
    return [StepPlan(step=plan.step, rows=tuple(sorted(rows, key=lambda row: row.num_tokens > 1))) for rows in pieces]


def _cut(row: RowPlan, num_tokens: int) -> tuple[RowPlan, RowPlan | None]:
    """The row's first tokens, and those that are left."""
    if row.num_tokens <= num_tokens or row.drafts:
        return row, None
    end = row.start + num_tokens
    scored, scored_rest = _cut_span(row.scored, end)
    first = msgspec.structs.replace(row, num_tokens=num_tokens, sample=None, carry=False, scored=scored)
    rest = msgspec.structs.replace(row, start=end, num_tokens=row.num_tokens - num_tokens, scored=scored_rest)
    return first, rest


def _cut_span(span: PromptSpan | None, place: int) -> tuple[PromptSpan | None, PromptSpan | None]:
    """The part of a span whose places are below this one, and the other."""
    if span is None:
        return None, None
    num_below = min(max(0, place - span.index + 1), span.num_tokens)
    below = msgspec.structs.replace(span, num_tokens=num_below)
    other = msgspec.structs.replace(span, index=span.index + num_below, num_tokens=span.num_tokens - num_below)
    return below if below.num_tokens else None, other if other.num_tokens else None


NO_TOKEN: Final = -1


class TopTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The likeliest tokens at a place, likeliest first; the chosen one is among them."""

    ids: bytes  # int32
    logprobs: bytes  # float32


class RowResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A token that a sampling row brought; or log-probabilities of its prompt; or an error that ends this request."""

    uid: int
    token_id: int
    logprob: float | None  # where asked
    error: str | None = None  # reason, a colon, a sentence; token_id is then NO_TOKEN
    top: TopTokens | None = None  # where asked
    prompt: PromptLogprobsMsg | None = None  # these alone; token_id is then NO_TOKEN
    is_complete: bool = False  # by the request's grammar nothing can follow


def failed_row(uid: int, error: str) -> RowResult:
    """The result of a row that failed: a reason of errors.py, a colon, a sentence."""
    return RowResult(uid=uid, token_id=NO_TOKEN, logprob=None, error=error)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, in the plan's order: for each row that samples one entry, and one for each draft that holds.

    Before them come those with log-probabilities of its prompt, any number of them. The last entry of a row may be an
    error in place of a token. So may the only one of a row that does not sample.
    """

    step: int
    rows: tuple[RowResult, ...]
