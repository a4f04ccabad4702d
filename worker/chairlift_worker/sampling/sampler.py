"""Tokens for the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from chairlift_worker.plan import RowPlan, RowResult, SampleSpec
from chairlift_worker.sampling.native import SampleStatus, sample_row

NO_TOKEN = -1

RowHook = Callable[[int], None]


class Sampler:
    """Chooses each row's token by itself: a row's trouble is its own, and its neighbours cannot change it."""

    def __init__(self, *, on_row: RowHook | None = None) -> None:
        """`on_row` is called with each sampling row's uid before it is processed; what it raises is that row's error.

        It exists to make faults on purpose.
        """
        self._on_row = on_row

    def sample(self, logits: torch.Tensor, rows: Iterable[RowPlan]) -> tuple[RowResult, ...]:
        """One result for each of `rows` that samples, in order.

        `logits` is (sampling rows, vocabulary), float32, one row for each of `rows` that has a SampleSpec. Raises
        ValueError where the two do not match, and nothing else: a row that cannot be sampled gets an error of its own.
        """
        sampling = [(row.uid, row.sample) for row in rows if row.sample is not None]
        if logits.ndim != 2 or logits.shape[0] != len(sampling) or logits.dtype != torch.float32:
            raise ValueError(f"{len(sampling)} rows sample, logits are {tuple(logits.shape)} of {logits.dtype}")
        logits = logits.cpu().contiguous()
        vocab_size = logits.shape[1]
        address, row_bytes = logits.data_ptr(), vocab_size * logits.element_size()
        return tuple(
            self._sample_one(uid, spec, address + i * row_bytes, vocab_size) for i, (uid, spec) in enumerate(sampling)
        )

    def _sample_one(self, uid: int, spec: SampleSpec, address: int, vocab_size: int) -> RowResult:
        try:
            if self._on_row is not None:
                self._on_row(uid)
            choice = sample_row(address, vocab_size, spec)
        except Exception as error:  # noqa: BLE001 - whatever one row's processing raises must end that request only
            return _failed(uid, f"POISONED_REQUEST: sampling raised {type(error).__name__}: {error}")
        if choice.status is SampleStatus.NAN:
            return _failed(uid, f"NUMERICAL_ERROR: the logits of token {spec.index} are not numbers.")
        if choice.status is SampleStatus.NOTHING:
            return _failed(uid, f"NUMERICAL_ERROR: no token has any probability at token {spec.index}.")
        return RowResult(uid=uid, token_id=choice.token_id, logprob=choice.logprob)


def _failed(uid: int, error: str) -> RowResult:
    return RowResult(uid=uid, token_id=NO_TOKEN, logprob=None, error=error)
