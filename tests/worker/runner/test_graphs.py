"""What graphs promise, on the stand-in and, where there is one, on a GPU."""

import pytest
import torch
from chairlift_worker.runner.graphs import CheckedGraphs, CudaGraphs, GraphMaker, GraphMisuseError, graphs_for

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def maker(device: str) -> GraphMaker:
    return graphs_for(torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_replay_works_on_what_is_in_the_inputs_by_then(device: str) -> None:
    inputs = torch.zeros(4, device=device)
    graph = maker(device).capture(lambda: inputs * 2 + 1, [inputs])
    for values in ([1.0, 2.0, 3.0, 4.0], [0.0, -1.0, 5.0, 0.5]):
        inputs.copy_(torch.tensor(values))
        assert graph.replay([inputs]).tolist() == [2 * value + 1 for value in values]


@pytest.mark.parametrize("device", DEVICES)
def test_a_result_is_written_over_by_the_next_replay(device: str) -> None:
    inputs = torch.ones(4, device=device)
    graph = maker(device).capture(lambda: inputs * 2, [inputs])
    first = graph.replay([inputs])
    inputs.fill_(5)
    graph.replay([inputs])
    assert first.tolist() == [10.0] * 4


@pytest.mark.parametrize(
    "other",
    [
        lambda inputs: inputs.clone(),  # elsewhere
        lambda inputs: inputs[:3],  # smaller
        lambda inputs: inputs.view(2, 2),
        lambda inputs: inputs.view(torch.int32),
        lambda inputs: inputs[::2],
    ],
)
def test_the_stand_in_refuses_inputs_that_are_not_those_of_the_capture(other) -> None:
    inputs = torch.ones(4)
    graph = CheckedGraphs().capture(lambda: inputs * 2, [inputs])
    with pytest.raises(GraphMisuseError, match="input 0 was"):
        graph.replay([other(inputs)])
    with pytest.raises(GraphMisuseError, match="captured with 1 tensors, replayed with 2"):
        graph.replay([inputs, inputs])


def test_a_cpu_has_the_stand_in() -> None:
    assert isinstance(maker("cpu"), CheckedGraphs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_real_graphs_in_one_pool() -> None:
    graphs = maker("cuda")
    assert isinstance(graphs, CudaGraphs)
    inputs = torch.arange(1024.0, device="cuda")
    sizes = [16, 256, 1024]
    captured = {size: graphs.capture(lambda size=size: inputs[:size].cumsum(0), [inputs[:size]]) for size in sizes}
    for size in (1024, 16, 256, 16):
        expected = size * (size - 1) / 2
        assert captured[size].replay([inputs[:size]])[-1].item() == expected
