"""Scheduler, memory and runner together, on models with sliding layers: the ids are those of transformers' generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.kv.layout import make_layout
from chairlift_worker.model import load_model
from chairlift_worker.plan import RowResult, StepPlan, StepResult
from chairlift_worker.runner import Runner
from support.exactness import Comparisons
from support.paged import some_ids
from support.runners import module_runner
from support.scheduling import Bench
from support.tiny_models import Reference, gemma3_config, generate_ids, tiny_model, write_model

WINDOW = 10  # of all the tiny models with sliding layers
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
NUM_TOKENS = 14
DEEP = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]

Cases = list[tuple[list[int], Reference]]


@pytest.fixture(scope="module")
def comparisons() -> Iterator[Comparisons]:
    counted = Comparisons()
    yield counted
    counted.check_ties()


@pytest.fixture(scope="module", params=["mistral", "gemma2", "gemma3", "gemma3 of 7 layers"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in {"mistral", "gemma2", "gemma3"}:
        return tiny_model(request.param)
    config = gemma3_config(num_hidden_layers=len(DEEP), layer_types=DEEP)
    return write_model(tmp_path_factory.mktemp("deep") / "model", config)


@pytest.fixture(scope="module")
def cases(folder: Path) -> Cases:
    prompts = [some_ids(length, seed=length) for length in LENGTHS]
    return [(prompt, generate_ids(folder, prompt, NUM_TOKENS)) for prompt in prompts]


class GreedyDevice:
    """A runner that takes the best token of each row."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan, *carried: object) -> StepResult:
        best = self._runner.forward(plan, *carried).argmax(dim=1).tolist()
        uids = [row.uid for row in plan.rows if row.sample]
        rows = tuple(RowResult(uid=uid, token_id=token, logprob=None) for uid, token in zip(uids, best, strict=True))
        return StepResult(step=plan.step, rows=rows)


def bench_of(folder: Path, *, page_size: int, chunk: int, spare: int | None = None, max_requests: int = 4) -> Bench:
    """A bench that computes for real. `spare` sectors are left beside what the longest case needs alone."""
    model = load_model(WorkerSettings(model=str(folder), dtype="float32"))
    layout = make_layout(model.layers, page_size=page_size)
    alone = layout.peak(0, max(LENGTHS) + NUM_TOKENS - 1, chunk)
    num_sectors = alone + spare if spare is not None else len(LENGTHS) * alone
    limits = {"max_prefill_chunk": chunk, "max_requests_per_batch": max_requests}
    windows = tuple(layer.sliding_window for layer in model.layers)
    bench = Bench(num_pages=num_sectors, page_size=page_size, sharing=False, windows=windows, limits=limits)
    assert [group.sector_len for group in bench.layout.groups] == [group.sector_len for group in layout.groups]
    bench.device = GreedyDevice(module_runner(model.module, layout, backend="native", num_sectors=num_sectors))
    return bench


def run_and_compare(bench: Bench, cases: Cases, comparisons: Comparisons, *, what: str) -> None:
    for uid, (prompt, _) in enumerate(cases, start=1):
        bench.add(uid, prompt, NUM_TOKENS)
    bench.run()
    for uid, (prompt, reference) in enumerate(cases, start=1):
        label = f"{what}, prompt of {len(prompt)}"
        comparisons.expect(bench.outputs[uid], reference.ids, reference.gaps, what=label)
    bench.assert_idle()


@pytest.mark.parametrize(("chunk", "page_size"), [(1, 5), (7, 4), (16, 3), (64, 16)])
def test_prompts_at_the_windows_edge_all_at_once_in_any_chunks(
    folder: Path, cases: Cases, comparisons: Comparisons, chunk: int, page_size: int
) -> None:
    bench = bench_of(folder, page_size=page_size, chunk=chunk)
    run_and_compare(bench, cases, comparisons, what=f"{folder.name} in chunks of {chunk}")
    assert max(len(plan.rows) for plan in bench.plans) == len(cases)


def test_one_after_the_other(folder: Path, cases: Cases, comparisons: Comparisons) -> None:
    bench = bench_of(folder, page_size=4, chunk=16, spare=0, max_requests=1)
    run_and_compare(bench, cases, comparisons, what=f"{folder.name} alone")


@pytest.mark.parametrize(("chunk", "page_size"), [(7, 4), (16, 3)])
def test_evicted_requests_are_computed_again_and_go_on_as_if_nothing_had_been(
    folder: Path, cases: Cases, comparisons: Comparisons, chunk: int, page_size: int
) -> None:
    """Short prompts start together and then grow, to their windows and beyond, in a cache for the longest one alone."""
    short = [some_ids(length, seed=length) for length in (2, 3, 5)]
    growing = [(prompt, generate_ids(folder, prompt, NUM_TOKENS)) for prompt in short]
    bench = bench_of(folder, page_size=page_size, chunk=chunk, spare=0, max_requests=7)
    run_and_compare(bench, [*growing, *cases], comparisons, what=f"{folder.name} evicted")
    assert sum(ending.preemptions for ending in bench.endings.values()) >= 1
    assert max(ending.preemptions for ending in bench.endings.values()) <= 4
