"""A forward pass captured once for each padded shape, and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chairlift_worker.attention.base import RowForm
from chairlift_worker.attention.metadata import PageRows
from chairlift_worker.graph_choice import GraphOptions
from chairlift_worker.runner.batch import LateTokens, StepBatch
from chairlift_worker.runner.forward import Forward, Pass, PlainPass
from chairlift_worker.runner.graphs import Graph, GraphMaker
from chairlift_worker.runner.inputs import StagedBatch, StaticInputs, tensors_of
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
        self._device = fixed[0].device
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
        ready = self.prepare(batch)
        ready.send()
        return ready.run()

    def prepare(self, batch: StepBatch, late: LateTokens | None = None) -> Pass:
        """The pass of a batch that is on the host, which may change as soon as this returns.

        As many may be prepared and not yet done as there are sets of inputs.
        """
        shape = self._shape(batch) if self._is_captured(batch) else None
        if shape is None or batch.sampled.shape[0] > shape.num_rows:  # drafts want logits at more places than rows
            return PlainPass(self._forward, batch.copied(self._device), late)
        self._turn = (self._turn + 1) % len(self._inputs)
        staged = self._inputs[self._turn].stage(batch, shape)
        return _Replay(self, (self._turn, shape), staged, batch.sampled.shape[0], late)

    def replay(self, key: tuple[int, PaddedShape], static: StepBatch) -> torch.Tensor:
        """The logits of all places of a padded batch in a set of inputs, until the next replay."""
        tensors = [*tensors_of(static), *self._fixed]
        graph = self._captured.get(key)
        if graph is None:
            graph = self._captured[key] = self._graphs.capture(lambda: self._forward(static), tensors)
        return graph.replay(tensors)

    def _is_captured(self, batch: StepBatch) -> bool:
        return self._options.decode if batch.in_place else self._options.varlen

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


@dataclass(frozen=True, slots=True)
class _Replay:
    owner: GraphForward
    key: tuple[int, PaddedShape]  # which set of inputs, and the shape
    staged: StagedBatch
    num_sampled: int
    late: LateTokens | None

    def send(self) -> None:
        self.staged.send()

    def run(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        static = self.staged.target
        if self.late is not None:
            assert tokens is not None, "the batch waits for tokens of the step before"
            self.late.put(static.input_ids, tokens)
        return self.owner.replay(self.key, static)[: self.num_sampled].clone()
