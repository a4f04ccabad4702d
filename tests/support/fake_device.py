"""A device without tensors: it keeps token ids where a real one keeps keys and values.

The next token is a hash of all tokens that the row can see *through its page tables*, each group of layers for itself,
so that a wrong page, a page given to two requests, a prefix that was shared too early, or a page that went back before
its window had passed changes the output.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Mapping, Sequence

from chairlift_worker.ipc.messages import PromptLogprobsMsg
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import NO_TOKEN, RowPlan, RowResult, StepPlan, StepResult, failed_row

VOCAB = 1000
RUBBISH = -7


def next_token(views: list[list[int]], seed: int, vocab_size: int = VOCAB) -> int:
    """The fake model: a function of what each kind of layers sees."""
    return zlib.crc32(repr((views, seed)).encode()) % vocab_size


def judgement(views: list[list[int]], token: int) -> int:
    """What the fake model says of a token of a prompt by what comes before it; a whole number, exact in float32."""
    return -zlib.crc32(repr((views, token)).encode()) % 1000


def solo_judgements(prompt: list[int], *, windows: Sequence[int | None] = (None,)) -> list[int]:
    """What it says of a prompt's tokens from the second on, by definition."""
    views = [[prompt[:i] if window is None else prompt[:i][-window:] for window in windows] for i in range(len(prompt))]
    return [judgement(views[index], prompt[index]) for index in range(1, len(prompt))]


def solo_run(
    prompt: list[int],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    seed: int = 0,
    windows: Sequence[int | None] = (None,),
    vocab_size: int = VOCAB,
) -> list[int]:
    """What a request alone generates, by definition; one window for each kind of layers, the widest view first."""
    history = list(prompt)
    output: list[int] = []
    while len(output) < max_new_tokens:
        token = next_token([history if window is None else history[-window:] for window in windows], seed, vocab_size)
        output.append(token)
        history.append(token)
        if token in stop_ids:
            break
    return output


class FakeDevice:
    """Runs plans over sectors cut as the layout says: what one group writes into a sector is gone for the others."""

    def __init__(self, *, layout: CacheLayout, num_sectors: int, vocab_size: int = VOCAB) -> None:
        self._vocab_size = vocab_size
        self._layout = layout
        self._cells: list[tuple[int, dict[int, int]]] = [(-1, {}) for _ in range(num_sectors)]  # group, tokens
        self._slots: dict[int, tuple[int, dict[int, int]]] = {}  # of the swap pool
        self._carried: Mapping[int, int] = {}
        self.num_computed = 0
        self.fail_at: dict[int, int] = {}  # by uid, the token of the output from which on sampling fails

    def execute(self, plan: StepPlan, carried: Mapping[int, int]) -> StepResult:
        """The copies, one forward pass and its samples."""
        for sector, slot in plan.moves.outs:
            group, tokens = self._cells[sector]
            self._slots[slot] = (group, dict(tokens))
        for slot, sector in plan.moves.ins:
            self._cells[sector] = self._slots.pop(slot)
        for source, target in plan.moves.copies:
            group, tokens = self._cells[source]
            self._cells[target] = (group, dict(tokens))
        self._carried = carried
        for row in plan.rows:  # all writes come before all reads, as in a layer
            self.num_computed += row.num_tokens
            for group in range(len(self._layout.groups)):
                self._write(row, group)
        results: list[RowResult] = []
        for row in plan.rows:
            self._views(row, row.start + row.num_tokens)  # what rows see that do not sample is read as well
            results += self._sample(row)
        return StepResult(step=plan.step, rows=tuple(results))

    def _write(self, row: RowPlan, group: int) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            sector, place = self._find(row, group, position)
            if self._cells[sector][0] != group:
                self._cells[sector] = (group, {})
            failed = position >= self._failing_position(row)
            self._cells[sector][1][place] = RUBBISH if failed else self._token(row, position)

    def _failing_position(self, row: RowPlan) -> float:
        """From where on the row's computation goes wrong: what a step writes there is rubbish."""
        if row.sample is None or row.uid not in self.fail_at:
            return math.inf
        return row.start + row.num_known - 1 + self.fail_at[row.uid] - row.sample.index

    def _token(self, row: RowPlan, position: int) -> int:
        if row.carry and position == row.start + row.num_tokens - 1:
            return self._carried[row.uid]  # NO_TOKEN where the step before failed: nobody looks at what comes of it
        number = position - row.start - row.num_known
        return row.tokens[position] if number < 0 else row.drafts[number]

    def _find(self, row: RowPlan, group: int, position: int) -> tuple[int, int]:
        sector_len = self._layout.groups[group].sector_len
        sector = row.tables[group][position // sector_len]
        assert sector >= 0, f"row {row.uid} looks at position {position}, whose sector it gave back"
        return sector, position % sector_len

    def _views(self, row: RowPlan, end: int) -> list[list[int]]:
        """What the row's query token before position `end` sees, in each group; the views before it are read too."""
        views = []
        for number, group in enumerate(self._layout.groups):
            begin = 0 if group.window is None else max(0, row.start - group.window + 1)
            seen = []
            for position in range(begin, end):
                sector, place = self._find(row, number, position)
                owner, tokens = self._cells[sector]
                assert owner == number, f"row {row.uid} finds the tokens of another kind of layers at {position}"
                seen.append(tokens[place])
            views.append(seen if group.window is None else seen[-group.window :])
        return views

    def _judge(self, row: RowPlan) -> list[RowResult]:
        """What the row says of its prompt, an entry a result."""
        if row.scored is None:
            return []
        results = []
        for index in range(row.scored.index, row.scored.index + row.scored.num_tokens):
            judged = array("f", [judgement(self._views(row, index), row.tokens[index])]).tobytes()
            message = PromptLogprobsMsg(uid=row.uid, index=index, logprobs=judged)
            results.append(RowResult(uid=row.uid, token_id=NO_TOKEN, logprob=None, prompt=message))
        return results

    def _sample(self, row: RowPlan) -> list[RowResult]:
        results = self._judge(row)
        if row.sample is None:
            return results
        for number in range(row.num_sampled):
            if row.start + row.num_known - 1 + number >= self._failing_position(row):
                return [*results, failed_row(row.uid, "POISONED_REQUEST: made to fail")]
            views = self._views(row, row.start + row.num_known + number)
            token = next_token(views, row.sample.seed, self._vocab_size)
            results.append(RowResult(uid=row.uid, token_id=token, logprob=None))
            if row.drafts[number : number + 1] != (token,):
                break
        return results
