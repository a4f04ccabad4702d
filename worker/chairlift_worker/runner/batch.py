"""A step's plan as tensors: packed token ids and positions, slots, and the rows' contexts.

All rows stand one after the other in one sequence, (1, tokens). Only whole rows are handled in Python; tokens and
pages are handled by numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from chairlift_worker.attention.metadata import StepMetadata
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import RowPlan, StepPlan
from chairlift_worker.runner.tables import Ints, TableReader

NOTHING_CARRIED: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model's forward pass takes."""

    input_ids: torch.Tensor  # (1, tokens) int64
    position_ids: torch.Tensor  # (1, tokens) int64
    sampled: torch.Tensor  # (sampling rows,) int64; places of the tokens whose logits are wanted
    metadata: tuple[StepMetadata, ...]  # one for each group of layers


class BatchBuilder:
    """Makes batches of plans."""

    def __init__(self, *, layout: CacheLayout, num_sectors: int, device: torch.device) -> None:
        """Padding points to sector number `num_sectors`."""
        self._readers = [
            TableReader(layout=layout, number=number, num_sectors=num_sectors, device=device)
            for number in range(len(layout.groups))
        ]
        self._device = device

    def build(self, plan: StepPlan, carried: Mapping[int, int] = NOTHING_CARRIED) -> StepBatch:
        """The batch of a plan, with the carried tokens of rows that need one, by uid.

        Raises ValueError where the plan breaks its own rules.
        """
        rows = plan.rows
        num_single = next((i for i, row in enumerate(rows) if row.num_tokens != 1), len(rows))
        singles, longer = rows[:num_single], rows[num_single:]
        _check(rows, longer)
        starts = np.fromiter((row.start for row in singles), np.int64, len(singles))
        tokens = [np.fromiter((_last_token(row, carried) for row in singles), np.int64, len(singles))]
        tokens += [_row_tokens(row, carried) for row in longer]
        positions = [starts, *(np.arange(row.start, row.start + row.num_tokens) for row in longer)]
        lasts = np.cumsum([row.num_tokens for row in rows]) - 1
        sampled = lasts[[row.sample is not None for row in rows]]
        return StepBatch(
            input_ids=self._tensor(np.concatenate(tokens))[None],
            position_ids=self._tensor(np.concatenate(positions))[None],
            sampled=self._tensor(sampled.astype(np.int64)),
            metadata=tuple(reader.read(singles, starts, longer) for reader in self._readers),
        )

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _ints(values: array[int]) -> Ints:
    """An int64 copy of an array('i'). The argument is itself a copy, so that no view keeps the owner's from growing."""
    return np.frombuffer(values, np.int32).astype(np.int64)


def _last_token(row: RowPlan, carried: Mapping[int, int]) -> int:
    """The row's last token. A row that could not be sampled carries none: what follows from it will be dropped."""
    return max(0, carried[row.uid]) if row.carry else row.tokens[row.start + row.num_tokens - 1]


def _row_tokens(row: RowPlan, carried: Mapping[int, int]) -> Ints:
    known = row.tokens[row.start : row.start + row.num_tokens - row.carry]
    return _ints(known if not row.carry else known + array("i", [_last_token(row, carried)]))


def _check(rows: Sequence[RowPlan], longer: Sequence[RowPlan]) -> None:
    if not rows:
        raise ValueError("a plan without rows cannot run")
    if any(row.num_tokens <= 1 for row in longer):
        raise ValueError("rows with one token come before the others, and no row is empty")
    for row in rows:
        end = row.start + row.num_tokens
        if len(row.tokens) < end - row.carry or row.start < 0:
            raise ValueError(f"row {row.uid} runs to position {end} with {len(row.tokens)} tokens")
