"""What a request gets does not depend on the load: alone, all at once, arriving at random, in reversed order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from chairlift_worker.model.loaded import LoadedModel
from support.engine import LIMITS, Outcome, Rig, Shape, loaded
from support.tiny_models import tiny_model
from support.workloads import Job, random_ids

JOBS = [Job(prompt=random_ids(2 + 5 * number, 500 + number), max_new_tokens=16) for number in range(20)]
SHAPE = Shape(
    num_sectors=300,
    page_size=16,
    limits=replace(LIMITS, max_batch_tokens=2048, max_prefill_chunk=512, max_requests_per_batch=len(JOBS)),
)


@dataclass(frozen=True)
class Bounds:
    """How far rounding may go: the runner-up's distance where ids part, and logprobs up to there."""

    gap: float
    logprob: float


BOUNDS = {"float32": Bounds(gap=1e-3, logprob=1e-4), "bfloat16": Bounds(gap=0.25, logprob=5e-2)}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma3"])
def model(request: pytest.FixtureRequest, dtype: str) -> LoadedModel:
    return loaded(tiny_model(request.param), dtype)


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[Outcome]:
    """Each by itself, in a batch of one."""
    outcomes = []
    for number, job in enumerate(JOBS, start=1):
        rig = Rig(model, SHAPE)
        rig.add(job.message(number))
        rig.run()
        outcomes.append(rig.outcomes[number])
    return outcomes


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("arrival", ["all at once", "at random", "reversed"])
def test_the_load_decides_nothing(
    model: LoadedModel, alone: list[Outcome], dtype: str, arrival: str, depth: int
) -> None:
    order = list(range(len(JOBS)))
    ticks = [0] * len(JOBS)
    if arrival == "reversed":
        order.reverse()
    if arrival == "at random":
        generator = random.Random(48)
        generator.shuffle(order)
        ticks = sorted(generator.randint(0, 30) for _ in JOBS)
    rig = run(model, order, ticks, depth)
    crowd = max(len(plan.rows) for plan in rig.executor.plans)
    assert crowd == len(JOBS) if arrival != "at random" else crowd > 5
    for uid, number in enumerate(order, start=1):
        compare(model, JOBS[number], rig.outcomes[uid], alone[number], BOUNDS[dtype])
    rig.assert_idle()


def run(model: LoadedModel, order: Sequence[int], ticks: Sequence[int], depth: int) -> Rig:
    """Adds requests at their ticks, the first with uid 1, and runs to the end."""
    rig = Rig(model, replace(SHAPE, depth=depth))
    for tick in range(max(ticks) + 1):
        for uid, number in enumerate(order, start=1):
            if ticks[uid - 1] == tick:
                rig.add(JOBS[number].message(uid))
        rig.turn()
    rig.run()
    rig.close()
    return rig


def compare(model: LoadedModel, job: Job, got: Outcome, wanted: Outcome, bounds: Bounds) -> None:
    assert len(got.ids) == len(wanted.ids) == job.max_new_tokens
    for index, (token, other) in enumerate(zip(got.ids, wanted.ids, strict=True)):
        if token != other:
            gap = gap_at(model, [*job.prompt, *wanted.ids[:index]])
            print(f"{model.dtype_name}: token {index} is {token}, alone it is {other}; the gap is {gap:.3g}")
            assert gap < bounds.gap
            return
        assert abs(got.logprobs[index] - wanted.logprobs[index]) < bounds.logprob


@torch.inference_mode()
def gap_at(model: LoadedModel, ids: list[int]) -> float:
    """By how much the plain model's best token beats the next."""
    logits = model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
    best = logits.topk(2).values
    return float(best[0] - best[1])
