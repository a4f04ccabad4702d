"""The likeliest tokens beside each, against the log-softmax of what was sampled from, or of the model's own logits."""

import math
from array import array

import msgspec
import pytest
import torch
from chairlift_worker.plan import RowPlan, RowResult, SampleSpec
from chairlift_worker.sampling import Sampler
from chairlift_worker.sampling.native import SampleStatus, row_logprobs
from support.processors import make_processors
from support.sampling_reference import reference_choice, reference_top

TOKENS = [3, 1, 4, 1, 5]
SAMPLINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 1.9},
    {"top_k": 3},
    {"top_p": 0.8, "temperature": 1.4},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
]
PROCESSORS = [
    {},
    {"repetition_penalty": 1.5, "banned_ids": [0, 2]},
    {"allowed_ids": [1, 3, 9]},
    {"logit_bias": {7: 9.0}},
]


def spec(**changes: object) -> SampleSpec:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "index": 2, "logprob": True}
    return SampleSpec(**{**neutral, **changes})


def choose(logits: torch.Tensor, sample: SampleSpec) -> RowResult:
    row = RowPlan(uid=1, tokens=array("i", TOKENS), start=4, num_tokens=1, tables=(), sample=sample)
    (got,) = Sampler().sample(logits[None].contiguous(), [row])
    assert got.error is None
    return got


def top_of(got: RowResult) -> list[tuple[int, float]]:
    assert got.top is not None
    return list(zip(array("i", got.top.ids), array("f", got.top.logprobs), strict=True))


def random_logits(size: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("changes", PROCESSORS)
def test_the_top_is_that_of_the_distribution_asked_for(changes: dict, sampling: dict, raw: bool) -> None:
    for size in (10, 300):
        for num_top in (1, 2, 5, size - 1, size, size + 1):
            logits = random_logits(size, seed=num_top)
            processors = make_processors(**changes) if changes else None
            asked = spec(**sampling, seed=num_top, num_top=min(num_top, 255), raw=raw, processors=processors)
            got = choose(logits, asked)
            token, logprob = reference_choice(logits, asked, TOKENS)
            wanted = reference_top(logits, asked, TOKENS, chosen=token)
            assert got.token_id == token
            assert got.logprob == pytest.approx(logprob, abs=1e-4)
            assert [i for i, _ in top_of(got)] == [i for i, _ in wanted]
            assert [value for _, value in top_of(got)] == pytest.approx([value for _, value in wanted], abs=1e-4)
            assert (token, got.logprob) in top_of(got)


@pytest.mark.parametrize("raw", [False, True])
def test_asking_for_the_top_changes_no_token_and_no_logprob(raw: bool) -> None:
    for sampling in SAMPLINGS:
        for seed in range(20):
            plain, logits = spec(seed=seed, **sampling), random_logits(200, seed=seed)
            asked = choose(logits, msgspec.structs.replace(plain, num_top=5, raw=raw))
            assert asked.token_id == choose(logits, plain).token_id
            assert raw or asked.logprob == choose(logits, plain).logprob


def test_a_token_that_is_none_of_the_likeliest_takes_the_last_place() -> None:
    logits = torch.tensor([2.0, 1.9, 1.8, 1.7, 0.0, -50.0])
    drawn = [choose(logits, spec(num_top=3, seed=seed)) for seed in range(200)]
    unlikely = [got for got in drawn if got.token_id == 4]
    assert unlikely
    biased = spec(temperature=0.0, num_top=3, raw=True, processors=make_processors(logit_bias={4: 100.0}))
    for got in [*unlikely, choose(logits, biased)]:
        assert [token for token, _ in top_of(got)] == [0, 1, 4]


def test_of_equals_the_lowest_ids_come_first() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0])
    assert [token for token, _ in top_of(choose(logits, spec(temperature=0.0, num_top=4)))] == [1, 2, 4, 0]


def test_logprobs_stay_finite_however_far_apart_logits_are() -> None:
    logits = torch.tensor([3.4e38, -3.4e38, 0.0, -math.inf])
    for raw in (False, True):
        got = choose(logits, spec(temperature=0.0, num_top=4, raw=raw))
        assert [token for token, _ in top_of(got)] == [0, 2, 1]
        assert all(math.isfinite(value) for _, value in top_of(got))


def test_a_token_is_placed_in_a_row_as_it_is() -> None:
    logits = random_logits(50)
    wanted = logits.double().log_softmax(-1)
    for token in range(50):
        got = row_logprobs(logits.data_ptr(), 50, token, num_top=0)
        assert (got.status, got.top) == (SampleStatus.OK, None)
        assert got.logprob == pytest.approx(float(wanted[token]), abs=1e-5)
    logits[3] = -math.inf
    assert row_logprobs(logits.data_ptr(), 50, 3, num_top=2).status is SampleStatus.NOTHING
    assert row_logprobs(logits.data_ptr(), 50, 50, num_top=2).status is SampleStatus.UNKNOWN_ID
    logits[4] = math.nan
    assert row_logprobs(logits.data_ptr(), 50, 5, num_top=2).status is SampleStatus.NOT_FINITE
