"""Tokens for the rows of a step, chosen where the logits are, without waiting for them.

The host learns of them when it asks for the results; the next step can take its tokens from the device before.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from chairlift_worker.plan import RowPlan, RowResult, SampleSpec, failed_row
from chairlift_worker.queues import sent
from chairlift_worker.sampling.choice import Filters, RowParams, choose_greedy, choose_seeded
from chairlift_worker.sampling.native import SampleStatus
from chairlift_worker.sampling.sampler import RowHook, check_logits, sampling_error, status_error

GREEDY_BELOW: Final = 1e-5  # as in worker/native/src/sampling.cpp
# Logits that are looked at in one go: what a row's noise takes is some hundred bytes for each.
CHUNK: Final = 1 << 23
_KNOWN: Final = frozenset({"temperature", "top_k", "top_p", "min_p", "seed", "index", "logprob"})
_OTHERS: Final = [
    (field.name, field.default) for field in msgspec.structs.fields(SampleSpec) if field.name not in _KNOWN
]


def is_for_device(rows: Sequence[RowPlan]) -> bool:
    """Whether the device can sample these rows: none of them asks for more than temperature, top-k, top-p and min-p."""
    return all(row.scored is None and (row.sample is None or _is_plain(row.sample)) for row in rows)


def _is_plain(spec: SampleSpec) -> bool:
    return all(getattr(spec, name) == default for name, default in _OTHERS)


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """What was sampled, on the device: for each place that was sampled at."""

    tokens: torch.Tensor  # (places,) int64; 0 where the row failed
    packed: torch.Tensor  # (3, places) int32: tokens, log-probabilities bit by bit, statuses


class DeviceSampler:
    """Chooses each row's token by itself, as `Sampler` does."""

    def __init__(self, *, on_row: RowHook | None = None) -> None:
        """`on_row` is called with a row's uid and a token's index when its result is read; what it raises is its error.

        It exists to make faults on purpose.
        """
        self._on_row = on_row

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[RowPlan]) -> DeviceTokens:
        """The tokens at all places of those of `rows` that sample; at drafts too, whether they hold or not.

        `logits` is (sampled places, vocabulary), float32. Raises ValueError where the two do not match, or where a row
        is not for the device.
        """
        check_logits(logits, rows)
        if not is_for_device(rows):
            raise ValueError("a row asks for what the device does not sample")
        specs = places_of(rows)
        step = max(1, CHUNK // logits.shape[1])
        chunks = [
            _sample(logits[first : first + step], specs[first : first + step]) for first in range(0, len(specs), step)
        ]
        packed = torch.cat(chunks, dim=1) if chunks else torch.empty((3, 0), dtype=torch.int32, device=logits.device)
        return DeviceTokens(tokens=packed[0].long(), packed=packed)

    def results(self, packed: torch.Tensor, rows: Sequence[RowPlan]) -> tuple[RowResult, ...]:
        """What `Sampler.sample` returns of the same rows; `packed` is that of their tokens, on the host by now."""
        tokens, statuses = packed[0].tolist(), packed[2].tolist()
        logprobs = packed[1].view(torch.float32).tolist()
        results: list[RowResult] = []
        place = 0
        for row in rows:
            if row.sample is None:
                continue
            for number in range(row.num_sampled):
                here = place + number
                outcome = (SampleStatus(statuses[here]), tokens[here], logprobs[here])
                results.append(self._result(row.uid, row.sample, row.sample.index + number, outcome))
                if results[-1].error is not None or [results[-1].token_id] != list(row.drafts[number : number + 1]):
                    break
            place += row.num_sampled
        return tuple(results)

    def _result(self, uid: int, spec: SampleSpec, index: int, outcome: tuple[SampleStatus, int, float]) -> RowResult:
        status, token, logprob = outcome
        try:
            if self._on_row is not None:
                self._on_row(uid, index)
        except Exception as error:  # noqa: BLE001 - whatever one row's processing raises must end that request only
            return failed_row(uid, sampling_error(error))
        if status is not SampleStatus.OK:
            return failed_row(uid, status_error(status, index))
        return RowResult(uid=uid, token_id=token, logprob=logprob if spec.logprob else None)


def places_of(rows: Sequence[RowPlan]) -> list[tuple[SampleSpec, int]]:
    """Each place that is sampled at: its row's parameters, and the index of its token."""
    return [
        (row.sample, row.sample.index + number)
        for row in rows
        if row.sample is not None
        for number in range(row.num_sampled)
    ]


def _sample(logits: torch.Tensor, places: Sequence[tuple[SampleSpec, int]]) -> torch.Tensor:
    tokens, logprobs = choose_greedy(logits)
    seeded = [number for number, (spec, _) in enumerate(places) if spec.temperature >= GREEDY_BELOW]
    if seeded:
        here = sent(torch.tensor(seeded), logits.device)
        chosen = [places[number] for number in seeded]
        params, filters = _params(chosen, logits), _filters(chosen, logits.shape[1])
        own, own_logprobs = choose_seeded(logits.index_select(0, here), params, filters)
        tokens.index_copy_(0, here, own)
        logprobs.index_copy_(0, here, own_logprobs)
    highest = logits.amax(dim=-1)  # not a number if any is not
    status = torch.where(highest == -math.inf, int(SampleStatus.NOTHING), int(SampleStatus.OK))
    status = torch.where(highest < math.inf, status, int(SampleStatus.NOT_FINITE))
    tokens = torch.where(status == int(SampleStatus.OK), tokens, 0)
    return torch.stack([tokens.int(), logprobs.contiguous().view(torch.int32), status.int()])


def _params(places: Sequence[tuple[SampleSpec, int]], logits: torch.Tensor) -> RowParams:
    """In one copy: floats go bit by bit among the integers."""
    floats = [
        array("d", column) for column in zip(*((s.temperature, s.top_p, s.min_p) for s, _ in places), strict=True)
    ]
    whole = [
        array("q", [min(spec.top_k, logits.shape[1]) for spec, _ in places]),
        array("Q", [spec.seed for spec, _ in places]),
        array("q", [index for _, index in places]),
    ]
    table = torch.stack([torch.frombuffer(column, dtype=torch.int64) for column in (*floats, *whole)])
    table = sent(table, logits.device)
    temperature, top_p, min_p = table[:3].view(torch.float64)
    return RowParams(temperature, top_p, min_p, *table[3:])


def _filters(places: Sequence[tuple[SampleSpec, int]], vocab_size: int) -> Filters:
    return Filters(
        max_top_k=max(spec.top_k if spec.top_k < vocab_size else 0 for spec, _ in places),
        top_p=any(spec.top_p < 1.0 for spec, _ in places),
        min_p=any(spec.min_p > 0.0 for spec, _ in places),
    )
