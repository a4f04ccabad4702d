"""When steps are captured, and what is said where they cannot be."""

import pytest
from chairlift_worker.graph_choice import KV_INTERVAL, Q_INTERVAL, GraphOptions, choose_graphs

BOTH, NONE = (True, True), (False, False)


def switches(options: GraphOptions) -> tuple[bool, bool]:
    return options.varlen, options.decode


@pytest.mark.parametrize(
    ("asked", "intervals", "expected"),
    [
        (None, (0, 0), NONE),
        (True, (0, 0), BOTH),
        ((True, False), (0, 0), (True, False)),
        ((False, True), (0, 0), (False, True)),
        (None, (32, 0), BOTH),
        (None, (0, 4096), BOTH),
        (False, (32, 4096), NONE),
    ],
)
def test_graphs_are_off_unless_asked_for_or_unless_an_interval_is_set(asked, intervals, expected) -> None:
    chosen = choose_graphs(asked, intervals=intervals, backend="native", has_fast_path=True)
    assert switches(chosen.value) == expected
    assert chosen.value.q_interval == (intervals[0] or Q_INTERVAL)
    assert chosen.value.kv_interval == (intervals[1] or KV_INTERVAL)
    assert chosen.warning is None


def test_without_a_fast_path_only_the_varlen_path_is_captured() -> None:
    chosen = choose_graphs(True, intervals=(0, 0), backend="native", has_fast_path=False)
    assert switches(chosen.value) == (True, False)
    assert "decode fast path is off" in chosen.reason


def test_on_a_cpu_the_reason_says_that_a_stand_in_runs() -> None:
    assert "stand-in" in choose_graphs(True, intervals=(0, 0), backend="native", has_fast_path=True).reason


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_backends_without_tables_are_refused_where_graphs_were_asked_for_and_else_a_warning(backend: str) -> None:
    with pytest.raises(ValueError, match=f"use_cuda_graph = True: attention backend {backend} does not read"):
        choose_graphs(True, intervals=(0, 0), backend=backend, has_fast_path=False)
    by_interval = choose_graphs(None, intervals=(32, 0), backend=backend, has_fast_path=False)
    assert switches(by_interval.value) == NONE
    assert by_interval.warning is not None


def test_both_switches_alike_are_shown_as_one() -> None:
    assert GraphOptions(varlen=True, decode=True).pair is True
    assert GraphOptions().pair is False
    assert GraphOptions(varlen=True).pair == (True, False)
