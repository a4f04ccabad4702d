from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from chairlift_client.cli import _report
from chairlift_client.cli._report import Measured, percentile
from chairlift_client.cli._workload import WorkItem, read_workload
from chairlift_client.testing import EOS_TOKEN_ID, FakeServer
from support.program import chairlift


def write(path: Path, entries: object) -> str:
    path.write_text(json.dumps(entries))
    return str(path)


def bench(target: str, workload: str, *args: str) -> tuple[int, dict[str, Any], str]:
    done = chairlift("bench", "--workload", workload, "--json", "--target", target, *args)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0, 2.0], list(range(101)), [0.1] * 7])
def test_percentiles_are_numpys(values: list[float]) -> None:
    for percent in (0, 1, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_gaps_are_between_tokens_and_none_within_a_delta() -> None:
    measured = Measured(sent=0.0, arrivals=[(1.0, 1), (1.5, 3), (2.5, 1)], ended=2.6)
    assert measured.gaps() == [0.5, 0.0, 0.0, 1.0]
    assert measured.num_tokens == 5


def test_the_report_counts_what_ended_well() -> None:
    good = Measured(sent=10.0, arrivals=[(10.25, 1), (10.5, 1)], ended=10.5)
    bad = Measured(sent=10.0, arrivals=[(10.125, 1)], ended=10.25, error="INTERNAL: x")
    figures = _report.report([good, bad], 0.5)
    expected = {"requests": 1, "failed": 1, "output_tokens": 2, "output_tokens_per_s": 4.0, "requests_per_s": 2.0}
    assert figures | expected == figures
    assert figures["ttft_ms"] == {"mean": 250.0, "p50": 250.0, "p99": 250.0}
    assert figures["itl_ms"]["mean"] == 250.0
    assert figures["e2e_ms"]["p99"] == 500.0
    assert "2 output tokens" in _report.table(figures)


@pytest.mark.parametrize(
    "entries",
    [
        {},
        [],
        [{"id": "a", "prompt": [], "max_new_tokens": 1}],
        [{"id": "a", "prompt": ["x"], "max_new_tokens": 1}],
        [{"id": "a", "prompt": [1], "max_new_tokens": "1"}],
        [{"id": "a", "prompt": [1]}],
        [{"id": "a", "prompt": [1], "max_new_tokens": 1, "temperature": 1}],
    ],
)
def test_a_workload_of_another_shape_is_refused(tmp_path: Path, entries: object) -> None:
    with pytest.raises(Exception, match=r"workload\.json"):
        read_workload(write(tmp_path / "workload.json", entries))


def test_a_workload_is_read_as_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path / "w.json", [{"id": "a", "prompt": [1, 2], "max_new_tokens": 3}])
    assert read_workload(path) == [WorkItem(name="a", prompt=[1, 2], max_new_tokens=3)]


@pytest.mark.parametrize("args", [[], ["--concurrency", "1"], ["--concurrency", "3"], ["--rate", "200"]])
def test_every_token_of_every_request_is_counted(server: FakeServer, tmp_path: Path, args: list[str]) -> None:
    workload = write(
        tmp_path / "w.json", [{"id": f"r{i}", "prompt": [i + 1], "max_new_tokens": i + 1} for i in range(12)]
    )
    code, figures, errors = bench(server.target, workload, *args)
    assert (code, errors) == (0, "")
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (12, 0, 78)
    assert figures["output_tokens_per_s"] == pytest.approx(78 / figures["seconds"])
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert figures[name].keys() == {"mean", "p50", "p99"}


def test_eos_ends_a_request_unless_ignored(server: FakeServer, tmp_path: Path) -> None:
    workload = write(tmp_path / "w.json", [{"id": "r", "prompt": [1, EOS_TOKEN_ID], "max_new_tokens": 10}])
    assert bench(server.target, workload)[1]["output_tokens"] == 2
    assert bench(server.target, workload, "--ignore-eos", "--temperature", "0")[1]["output_tokens"] == 10


def test_latencies_are_those_of_the_service(tmp_path: Path) -> None:
    with FakeServer(f"unix:{tmp_path}/s", token_delay=0.05) as server:
        workload = write(tmp_path / "w.json", [{"id": "r", "prompt": [1], "max_new_tokens": 10}] * 2)
        _, figures, _ = bench(server.target, workload)
    assert 50 <= figures["ttft_ms"]["p50"] < 150
    assert 40 < figures["itl_ms"]["mean"] < 70
    assert 500 <= figures["e2e_ms"]["p50"] < 800


def test_one_at_a_time_takes_as_long_as_the_requests_together(tmp_path: Path) -> None:
    with FakeServer(f"unix:{tmp_path}/s", token_delay=0.02) as server:
        workload = write(tmp_path / "w.json", [{"id": "r", "prompt": [1], "max_new_tokens": 10}] * 4)
        alone = bench(server.target, workload, "--concurrency", "1")[1]["seconds"]
        at_once = bench(server.target, workload)[1]["seconds"]
    assert alone >= 0.8
    assert at_once < 0.6


def test_a_request_that_fails_is_told_and_makes_it_exit_code_1(server: FakeServer, tmp_path: Path) -> None:
    server.fail_next("Generate", grpc.StatusCode.INTERNAL, "broken", reason="NUMERICAL_ERROR")
    workload = write(tmp_path / "w.json", [{"id": "r", "prompt": [1], "max_new_tokens": 2}] * 3)
    code, figures, errors = bench(server.target, workload)
    assert (code, figures["requests"], figures["failed"]) == (1, 2, 1)
    assert "NUMERICAL_ERROR" in errors


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Exception, match="pip install matplotlib"):
        _report.check_plotting()
