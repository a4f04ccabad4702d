"""Forward passes by the native decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from chairlift_worker.attention.base import RowForm
from chairlift_worker.attention.metadata import PageRows
from chairlift_worker.attention.native_kernel import StepStruct
from chairlift_worker.decoder.model import DecoderModel
from chairlift_worker.decoder.native_decoder import DecoderStepStruct, RopeStruct, decode
from chairlift_worker.decoder.rope import RopeTable
from chairlift_worker.runner.batch import StepBatch


class DecoderForward:
    """One call of native code for each pass; the number of threads is that of the thread that makes the pass."""

    form: RowForm = "pages"

    def __init__(self, *, model: DecoderModel, ropes: Sequence[RopeTable]) -> None:
        self.model = model
        self._ropes = ropes
        self._stride = -(-model.vocab_size // 16) * 16

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """(sampling rows, vocabulary) float32 logits, in the batch's order. Raises ValueError for what cannot be."""
        threads = torch.get_num_threads()
        metadata = cast("tuple[PageRows, ...]", batch.metadata)
        groups = (StepStruct * len(metadata))(*(_rows(rows, threads) for rows in metadata))
        furthest = int(batch.position_ids.max())
        for rope in self._ropes:
            rope.reach(furthest)
        ropes = (RopeStruct * len(self._ropes))(
            *(RopeStruct(rope.cosines.data_ptr(), rope.sines.data_ptr()) for rope in self._ropes)
        )
        logits = torch.empty((len(batch.sampled), self._stride))
        step = DecoderStepStruct(
            groups=groups,
            ropes=ropes,
            tokens=batch.input_ids.data_ptr(),
            positions=batch.position_ids.data_ptr(),
            sampled=batch.sampled.data_ptr(),
            logits=logits.data_ptr(),
            logits_stride=self._stride,
            num_tokens=batch.input_ids.shape[1],
            num_sampled=len(batch.sampled),
            num_groups=len(metadata),
            num_ropes=len(self._ropes),
            num_threads=threads,
        )
        decode(self.model.struct, step)
        return logits[:, : self.model.vocab_size]


def _rows(rows: PageRows, threads: int) -> StepStruct:
    return StepStruct(
        row_first=rows.first.data_ptr(),
        row_start=rows.start.data_ptr(),
        tables=rows.tables.data_ptr(),
        table_stride=rows.tables.stride(0),
        num_rows=rows.num_rows,
        num_threads=threads,
    )
