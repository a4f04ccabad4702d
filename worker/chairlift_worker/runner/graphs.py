"""Work captured once and replayed: on a GPU as a graph, on a CPU by a stand-in that holds callers to a graph's rules.

A graph runs the same work on the same addresses: what differs from step to step has to be written into the tensors that
it was captured with. Its result lies in memory that the next replay, of any graph, writes over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Work = Callable[[], torch.Tensor]


class Graph(Protocol):
    """Captured work."""

    def replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The work's result; `inputs` are the tensors that it was captured with. Valid until the next replay."""
        ...


class GraphMaker(Protocol):
    """Captures work."""

    def capture(self, work: Work, inputs: Sequence[torch.Tensor]) -> Graph:
        """The graph of a piece of work that reads what differs from step to step from `inputs`, and only from them."""
        ...


class GraphMisuseError(RuntimeError):
    """A graph was to be replayed with other inputs than those that it was captured with."""


class CheckedGraphs:
    """The stand-in: work is done anew each time, once its inputs are those of the capture."""

    def capture(self, work: Work, inputs: Sequence[torch.Tensor]) -> Graph:
        """See `GraphMaker`."""
        return _CheckedGraph(work, inputs)


class _CheckedGraph:
    def __init__(self, work: Work, inputs: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._facts = [_facts(tensor) for tensor in inputs]
        self._output: torch.Tensor | None = None

    def replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Graph`. Raises GraphMisuseError, in words, for other tensors than those of the capture."""
        if len(inputs) != len(self._facts):
            raise GraphMisuseError(f"captured with {len(self._facts)} tensors, replayed with {len(inputs)}")
        for number, (tensor, known) in enumerate(zip(inputs, self._facts, strict=True)):
            if (facts := _facts(tensor)) != known:
                raise GraphMisuseError(f"input {number} was {known} when the graph was captured, and is {facts}")
        result = self._work()
        if self._output is None:
            self._output = torch.empty_like(result)
        return self._output.copy_(result)


class CudaGraphs:
    """Graphs of one CUDA device, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work, inputs: Sequence[torch.Tensor]) -> Graph:
        """See `GraphMaker`. The work is done once before, so that nothing happens for the first time in the capture."""
        before, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            work()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()
        return _CudaGraph(graph, output, inputs)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        self._graph = graph
        self._output = output
        self._inputs = inputs  # so that the memory behind the addresses stays

    def replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002 - theirs are the addresses
        """See `Graph`."""
        self._graph.replay()
        return self._output


def graphs_for(device: torch.device) -> GraphMaker:
    """What captures work on a device."""
    return CudaGraphs() if device.type == "cuda" else CheckedGraphs()


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
