"""Tokens for the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import torch

from chairlift_worker.plan import RowPlan, RowResult, SampleSpec, failed_row
from chairlift_worker.sampling.native import SampleStatus, sample_row

RowHook = Callable[[int, int], None]


class Sampler:
    """Chooses each row's token by itself: a row's trouble is its own, and its neighbours cannot change it."""

    def __init__(self, *, on_row: RowHook | None = None) -> None:
        """`on_row` is called with a row's uid and a token's index before that is sampled; what it raises is its error.

        It exists to make faults on purpose.
        """
        self._on_row = on_row

    def sample(self, logits: torch.Tensor, rows: Iterable[RowPlan]) -> tuple[RowResult, ...]:
        """The results of those of `rows` that sample, in order: one each, and one more for each draft that holds.

        A draft holds if it is the token that is sampled at the place before it; the rest of its row's drafts is then
        looked at, else not. So the tokens are those that would have come one a step.

        `logits` is (sampled places, vocabulary), float32, `num_sampled` of each row. Raises ValueError where the two do
        not match, and nothing else: a row that cannot be sampled gets an error of its own.
        """
        sampling = [row for row in rows if row.sample is not None]
        num_places = sum([row.num_sampled for row in sampling])
        if logits.ndim != 2 or logits.shape[0] != num_places or logits.dtype != torch.float32:
            raise ValueError(f"{num_places} places are sampled, logits are {tuple(logits.shape)} of {logits.dtype}")
        logits = logits.cpu().contiguous()
        vocab_size = logits.shape[1]
        address, row_bytes = logits.data_ptr(), vocab_size * logits.element_size()
        results: list[RowResult] = []
        for row in sampling:
            results += self._sample_row(row, address, row_bytes, vocab_size)
            address += row.num_sampled * row_bytes
        return tuple(results)

    def _sample_row(self, row: RowPlan, address: int, row_bytes: int, vocab_size: int) -> list[RowResult]:
        spec = row.sample
        assert spec is not None
        results = [self._sample_one(row.uid, spec, address, vocab_size)]
        for number, draft in enumerate(row.drafts, start=1):
            if results[-1].error is not None or results[-1].token_id != draft:
                break
            here = msgspec.structs.replace(spec, index=spec.index + number)
            results.append(self._sample_one(row.uid, here, address + number * row_bytes, vocab_size))
        return results

    def _sample_one(self, uid: int, spec: SampleSpec, address: int, vocab_size: int) -> RowResult:
        try:
            if self._on_row is not None:
                self._on_row(uid, spec.index)
            choice = sample_row(address, vocab_size, spec)
        except Exception as error:  # noqa: BLE001 - whatever one row's processing raises must end that request only
            return failed_row(uid, f"POISONED_REQUEST: sampling raised {type(error).__name__}: {error}")
        if choice.status is SampleStatus.NOT_FINITE:
            return failed_row(uid, f"NUMERICAL_ERROR: the logits of token {spec.index} are not finite numbers.")
        if choice.status is SampleStatus.NOTHING:
            return failed_row(uid, f"NUMERICAL_ERROR: no token has any probability at token {spec.index}.")
        return RowResult(uid=uid, token_id=choice.token_id, logprob=choice.logprob)
