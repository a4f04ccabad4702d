"""Tokens for the rows of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch

from chairlift_worker.constraint.errors import ConstraintError
from chairlift_worker.plan import NOTHING_CARRIED, RowPlan, RowResult, SampleSpec, failed_row
from chairlift_worker.sampling.masks import Masks
from chairlift_worker.sampling.native import Choice, SampleStatus, row_logprobs, sample_row
from chairlift_worker.sampling.processors import mask_row, process_row
from chairlift_worker.sampling.prompts import judge_prompt

RowHook = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """Logits of one place, and the tokens before it where processors look at them."""

    address: int
    num_logits: int
    tokens: array[int] | None


class Sampler:
    """Chooses each row's token by itself: a row's trouble is its own, and its neighbours cannot change it."""

    def __init__(self, *, on_row: RowHook | None = None, masks: Masks | None = None) -> None:
        """`masks` are asked for rows that are constrained.

        `on_row` is called with a row's uid and a token's index before that is sampled; what it raises is its error. It
        exists to make faults on purpose.
        """
        self._on_row = on_row
        self._masks = masks
        self._processed = (ctypes.c_float * 0)()  # one row's logits

    def sample(
        self, logits: torch.Tensor, rows: Iterable[RowPlan], carried: Mapping[int, int] = NOTHING_CARRIED
    ) -> tuple[RowResult, ...]:
        """The results of those of `rows` that sample, in order: one each, and one more for each draft that holds.

        Before them come the log-probabilities of a row's prompt, where they are wanted: such a row need not sample.

        A draft holds if it is the token that is sampled at the place before it; the rest of its row's drafts is then
        looked at, else not. So the tokens are those that would have come one a step.

        `logits` is (wanted places, vocabulary), float32, `num_wanted` of each row; `carried` has the tokens of rows
        that carry one, by uid. Raises ValueError where logits and rows do not match, and nothing else: a row that
        cannot be sampled gets an error of its own.
        """
        wanting = [row for row in rows if row.num_wanted]
        check_logits(logits, wanting)
        logits = logits.cpu().contiguous()
        vocab_size = logits.shape[1]
        address, row_bytes = logits.data_ptr(), vocab_size * logits.element_size()
        results: list[RowResult] = []
        for row in wanting:
            judged = [] if row.scored is None else judge_prompt(row, address, vocab_size)
            results += judged
            if row.sample is not None and not (judged and judged[-1].error is not None):
                results += self._sample_row(row, carried, address + row.num_scored * row_bytes, vocab_size)
            address += row.num_wanted * row_bytes
        return tuple(results)

    def _sample_row(self, row: RowPlan, carried: Mapping[int, int], address: int, vocab_size: int) -> list[RowResult]:
        spec = row.sample
        assert spec is not None
        tokens = None if spec.processors is None else row.known_tokens(carried)
        results = [self._sample_one(row.uid, spec, _Place(address, vocab_size, tokens))]
        for draft in row.drafts:
            if results[-1].error is not None or results[-1].token_id != draft or results[-1].is_complete:
                break
            if tokens is not None:
                tokens.append(draft)
            spec = msgspec.structs.replace(spec, index=spec.index + 1)
            address += vocab_size * ctypes.sizeof(ctypes.c_float)
            results.append(self._sample_one(row.uid, spec, _Place(address, vocab_size, tokens)))
        return results

    def _sample_one(self, uid: int, spec: SampleSpec, place: _Place) -> RowResult:
        try:
            if self._on_row is not None:
                self._on_row(uid, spec.index)
            allowed = self._masks.mask(uid, spec.index) if self._masks is not None and spec.constrained else None
            choice = self._choose(spec, place, allowed)
            is_complete = False
            if self._masks is not None and allowed is not None and choice.status is SampleStatus.OK:
                is_complete = self._masks.chosen(uid, choice.token_id)
        except ConstraintError as error:
            return failed_row(uid, str(error))
        except Exception as error:  # noqa: BLE001 - whatever one row's processing raises must end that request only
            return failed_row(uid, sampling_error(error))
        if choice.status is not SampleStatus.OK:
            return failed_row(uid, status_error(choice.status, spec.index))
        return RowResult(
            uid=uid, token_id=choice.token_id, logprob=choice.logprob, top=choice.top, is_complete=is_complete
        )

    def _choose(self, spec: SampleSpec, place: _Place, allowed: int | None) -> Choice:
        """The row's token, with the log-probabilities that were asked for. `allowed` is where its mask stands."""
        address = place.address
        if spec.processors is not None and place.tokens is not None:
            address = self._room(place.num_logits)
            status = process_row(
                place.address,
                place.num_logits,
                spec.processors,
                tokens=place.tokens,
                num_output=spec.index,
                out=address,
            )
            if status is not SampleStatus.OK:
                return Choice(status=status, token_id=-1, logprob=None)
        if allowed is not None:
            room = self._room(place.num_logits)
            status = mask_row(address, place.num_logits, allowed, out=room)
            if status is not SampleStatus.OK:
                return Choice(status=status, token_id=-1, logprob=None)
            address = room
        if not (spec.raw and spec.logprob):
            return sample_row(address, place.num_logits, spec)
        choice = sample_row(address, place.num_logits, msgspec.structs.replace(spec, logprob=False, num_top=0))
        if choice.status is not SampleStatus.OK:
            return choice
        return row_logprobs(place.address, place.num_logits, choice.token_id, num_top=spec.num_top)

    def _room(self, num_logits: int) -> int:
        """Where one row's processed logits go."""
        if len(self._processed) != num_logits:
            self._processed = (ctypes.c_float * num_logits)()
        return ctypes.addressof(self._processed)


def check_logits(logits: torch.Tensor, rows: Iterable[RowPlan]) -> None:
    """Raises ValueError unless these are the logits of the places that are sampled at."""
    num_places = sum([row.num_wanted for row in rows])
    if logits.ndim != 2 or logits.shape[0] != num_places or logits.dtype != torch.float32:
        raise ValueError(f"{num_places} places are wanted, logits are {tuple(logits.shape)} of {logits.dtype}")


def sampling_error(error: Exception) -> str:
    """What a request is told whose sampling raised."""
    return f"POISONED_REQUEST: sampling raised {type(error).__name__}: {error}"


def status_error(status: SampleStatus, index: int) -> str:
    """What a request is told whose logits no token can be chosen from; `index` is that token's."""
    if status is SampleStatus.NOT_FINITE:
        return f"NUMERICAL_ERROR: the logits of token {index} are not finite numbers."
    return f"NUMERICAL_ERROR: no token has any probability at token {index}."
