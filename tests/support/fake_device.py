"""A device without tensors: it keeps token ids where a real one keeps keys and values.

The next token is a hash of all tokens that the row can see *through its page table*, so that a wrong page, a page
given to two requests, or a prefix that was shared too early changes the output.
"""

from __future__ import annotations

import zlib

from chairlift_worker.plan import RowPlan, RowResult, StepPlan, StepResult

VOCAB = 1000


def next_token(history: list[int], seed: int) -> int:
    """The fake model: a function of the whole history."""
    return zlib.crc32(repr((history, seed)).encode()) % VOCAB


def solo_run(
    prompt: list[int], *, max_new_tokens: int, stop_ids: frozenset[int] = frozenset(), seed: int = 0
) -> list[int]:
    """What a request alone generates, by definition."""
    history = list(prompt)
    output: list[int] = []
    while len(output) < max_new_tokens:
        token = next_token(history, seed)
        output.append(token)
        history.append(token)
        if token in stop_ids:
            break
    return output


class FakeDevice:
    """Runs plans over `num_pages` pages of `page_size` slots."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots: list[list[int]] = [[-1] * page_size for _ in range(num_pages)]
        self.num_computed = 0
        self.fail_uids: set[int] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass and its samples."""
        for row in plan.rows:  # all writes come before all reads, as in a layer
            self._write(row)
        return StepResult(step=plan.step, rows=tuple(self._sample(row) for row in plan.rows if row.sample is not None))

    def _write(self, row: RowPlan) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            self.slots[row.pages[position // self.page_size]][position % self.page_size] = row.tokens[position]
            self.num_computed += 1

    def _sample(self, row: RowPlan) -> RowResult:
        assert row.sample is not None
        if row.uid in self.fail_uids:
            return RowResult(uid=row.uid, token_id=0, logprob=None, error="POISONED_REQUEST: made to fail")
        history = [
            self.slots[row.pages[position // self.page_size]][position % self.page_size]
            for position in range(row.start + row.num_tokens)
        ]
        return RowResult(uid=row.uid, token_id=next_token(history, row.sample.seed), logprob=None)
