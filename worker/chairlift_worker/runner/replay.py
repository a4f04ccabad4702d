"""A forward pass captured once for each padded shape, and replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chairlift_worker.attention.base import RowForm
from chairlift_worker.attention.metadata import PageRows
from chairlift_worker.graph_choice import GraphOptions
from chairlift_worker.runner.batch import StepBatch
from chairlift_worker.runner.forward import Forward
from chairlift_worker.runner.graphs import Graph, GraphMaker
from chairlift_worker.runner.inputs import StaticInputs, tensors_of
from chairlift_worker.runner.padding import PaddedShape, Padding


class GraphForward:
    """Another pass, captured at the first batch of each padded shape."""

    form: RowForm = "pages"

    def __init__(
        self,
        *,
        forward: Forward,
        graphs: GraphMaker,
        inputs: Sequence[StaticInputs],
        fixed: Sequence[torch.Tensor],
        padding: Padding,
        options: GraphOptions,
    ) -> None:
        """`fixed` is what else the pass reads, and where: weights and cache.

        Batches go into the sets of `inputs` in turn, so that what is written for a step leaves the steps that may still
        be in flight alone. Each set has graphs of its own, since they are bound to its addresses.

        Raises ValueError for a pass that is not told its rows as tables of pages.
        """
        if forward.form != self.form:
            raise ValueError("graphs need tables of pages: by slots, the work has another shape in each step")
        self._forward = forward
        self._graphs = graphs
        self._inputs = inputs
        self._fixed = fixed
        self._padding = padding
        self._options = options
        self._turn = 0
        self._captured: dict[tuple[int, PaddedShape], Graph] = {}

    @property
    def num_captured(self) -> int:
        """How many graphs there are, of all sets of inputs."""
        return len(self._captured)

    @property
    def max_captured(self) -> int:
        """How many there can be."""
        shapes = self._padding.max_shapes(varlen=self._options.varlen, decode=self._options.decode)
        return len(self._inputs) * shapes

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """(sampled places, vocabulary) float32 logits, in the batch's order. Raises whatever the pass raises."""
        if not (self._options.decode if batch.in_place else self._options.varlen):
            return self._forward(batch)
        shape = self._shape(batch)
        if batch.sampled.shape[0] > shape.num_rows:
            return self._forward(batch)  # drafts want logits at more places than there are rows
        self._turn = (self._turn + 1) % len(self._inputs)
        static = self._inputs[self._turn].fill(batch, shape)
        tensors = [*tensors_of(static), *self._fixed]
        key = (self._turn, shape)
        graph = self._captured.get(key)
        if graph is None:
            graph = self._captured[key] = self._graphs.capture(lambda: self._forward(static), tensors)
        return graph.replay(tensors)[: batch.sampled.shape[0]].clone()

    def _shape(self, batch: StepBatch) -> PaddedShape:
        rows = batch.metadata[0]
        assert isinstance(rows, PageRows)
        ends = rows.start + rows.first.diff()
        return self._padding.shape(
            in_place=batch.in_place,
            num_tokens=batch.input_ids.shape[1],
            num_rows=rows.num_rows,
            num_sampled=batch.sampled.shape[0],
            context_len=int(ends.max()),
        )
