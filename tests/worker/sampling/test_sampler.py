"""The sampler against its definition, against transformers' processors, and against chance."""

import math
from array import array

import numpy as np
import pytest
import torch
from chairlift_worker.plan import RowPlan, SampleSpec
from chairlift_worker.sampling import Sampler
from chairlift_worker.sampling.native import philox4x32
from support.sampling_reference import gumbel_noise, philox, processed, reference_choice

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
PROCESSORS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.9, "top_k": 1},
    {"top_k": 40},
    {"top_k": 2000},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.5},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
]


def spec(**changes: object) -> SampleSpec:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "index": 0, "logprob": True}
    return SampleSpec(**{**neutral, **changes})


def rows(*specs: SampleSpec | None) -> list[RowPlan]:
    empty = array("i")
    return [RowPlan(uid=10 + i, tokens=empty, start=0, num_tokens=1, tables=(), sample=s) for i, s in enumerate(specs)]


def choose(logits: torch.Tensor, *specs: SampleSpec):
    """Results of the same logits under each spec."""
    return Sampler().sample(logits.float().expand(len(specs), -1).contiguous(), rows(*specs))


def random_logits(size: int, *, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_the_generator_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(result)
    assert tuple(philox(np.array([words(counter)], np.uint32), words(key))[0]) == words(result)


@pytest.mark.parametrize("size", [1, 2, 3, 127, 128, 129, 5001])
@pytest.mark.parametrize("changes", PROCESSORS)
def test_token_and_logprob_are_those_of_the_definition(changes: dict, size: int) -> None:
    for seed in (0, 3, 2**32 + 5, 2**64 - 1):
        logits = random_logits(size, seed=seed % 1000)
        for index in (0, 1, 2**33):
            wanted = spec(seed=seed, index=index, **changes)
            (got,) = choose(logits, wanted)
            token, logprob = reference_choice(logits, wanted)
            assert got.token_id == token
            assert got.logprob == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.4}, {"top_k": 30, "top_p": 0.5}])
def test_exactly_the_tokens_that_transformers_keeps_are_ever_chosen(changes: dict) -> None:
    logits = random_logits(24, seed=8, scale=1.0)
    kept = set(torch.nonzero(processed(logits, spec(**changes)) > -math.inf).flatten().tolist())
    seen = {result.token_id for result in choose(logits, *(spec(seed=seed, **changes) for seed in range(3000)))}
    assert seen == kept


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.7}, {"min_p": 0.3}])
def test_among_equal_logits_as_many_are_kept_as_transformers_keeps(changes: dict) -> None:
    # Which of the equals top-p keeps is torch.sort's affair, which promises no order; here it is the lowest ids.
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 2.0, 1.0])
    kept = processed(logits, spec(**changes)) > -math.inf
    seen = sorted({result.token_id for result in choose(logits, *(spec(seed=s, **changes) for s in range(2000)))})
    assert sorted(logits[seen].tolist()) == sorted(logits[kept].tolist())
    for value in set(logits[seen].tolist()):
        equals = torch.nonzero(logits == value).flatten().tolist()
        chosen = [token for token in seen if logits[token] == value]
        assert chosen == equals[: len(chosen)]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 6}, {"top_p": 0.8}])
def test_frequencies_are_the_softmaxs(changes: dict) -> None:
    logits = random_logits(16, seed=4, scale=1.2)
    num_draws = 40_000
    drawn = choose(logits, *(spec(seed=seed, index=seed % 7, **changes) for seed in range(num_draws)))
    counts = np.bincount([result.token_id for result in drawn], minlength=16)
    expected = processed(logits, spec(**changes)).double().softmax(-1).numpy() * num_draws
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations


def test_noise_is_fresh_at_every_step_and_for_every_seed() -> None:
    equal = torch.zeros(1000)
    by_index = {result.token_id for result in choose(equal, *(spec(index=index) for index in range(32)))}
    by_seed = {result.token_id for result in choose(equal, *(spec(seed=seed) for seed in range(32)))}
    assert len(by_index) > 28
    assert len(by_seed) > 28


def test_noise_of_neighbouring_steps_and_tokens_is_not_correlated() -> None:
    noise = np.stack([gumbel_noise(20_000, 5, index) for index in range(4)])
    pairs = [(noise[0], noise[1]), (noise[2], noise[3]), (noise[0, :-1], noise[0, 1:])]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(20_000) for a, b in pairs)


def test_a_row_is_the_same_whatever_its_neighbours_are_and_wherever_it_stands() -> None:
    mine, other = random_logits(3000, seed=1), random_logits(3000, seed=2)
    a = spec(seed=42, temperature=0.8, index=7)
    (alone,) = choose(mine, a)
    neighbours = [spec(temperature=0.0), spec(top_k=5), spec(seed=9, top_p=0.5), spec(min_p=0.3, logprob=False)]
    for place in range(len(neighbours) + 1):
        specs = [*neighbours[:place], a, *neighbours[place:]]
        logits = torch.stack([mine if i == place else other for i in range(len(specs))])
        got = Sampler().sample(logits, rows(*specs))[place]
        assert (got.token_id, got.logprob) == (alone.token_id, alone.logprob)


def test_sampling_leaves_logits_and_global_random_state_alone() -> None:
    logits = random_logits(300)[None]
    before, state = logits.clone(), torch.get_rng_state()
    Sampler().sample(logits, rows(spec(top_p=0.5, temperature=0.3)))
    assert torch.equal(logits, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 9.9e-6])
def test_greedy_takes_the_lowest_id_of_the_maximum(temperature: float) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    (got,) = choose(logits, spec(temperature=temperature, top_k=2, top_p=0.1, min_p=0.9))
    assert got.token_id == 1
    assert got.logprob == pytest.approx(float(logits.log_softmax(-1)[1]), abs=1e-6)


@pytest.mark.parametrize("changes", [{"temperature": 1e-5}, {"temperature": 1e-4}, {"top_p": 1e-9}, {"top_k": 1}])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30])
def test_values_that_leave_one_token_give_the_maximum(changes: dict, scale: float) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, -3.0]) * scale
    if scale == 1e-3 and "temperature" in changes:
        logits *= 10  # apart by many temperatures
    (got,) = choose(logits, spec(**changes))
    assert got.token_id == 1
    assert got.logprob == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_values_never_give_anything_but_a_token_with_a_finite_logprob(dtype: torch.dtype) -> None:
    vocab = 500
    logits = random_logits(vocab, scale=8).to(dtype).float()
    logits[::7] = -math.inf  # banned
    specs = [
        spec(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature in (0.0, 1e-9, 1e-5, 1e-4, 1e-3, 1.0, 100.0, 1e30)
        for top_k in (-1, 0, 1, vocab, vocab + 1, 2**31 - 1, 2**40)
        for top_p in (1e-9, 0.5, 1.0)
        for min_p in (0.0, 0.5, 1 - 1e-12)
    ]
    for got in choose(logits, *specs):
        assert got.error is None
        assert 0 <= got.token_id < vocab
        assert got.token_id % 7 != 0
        assert math.isfinite(got.logprob)


@pytest.mark.parametrize("top_k", [-1, 0, 50, 51, 2**31 - 1])
def test_top_k_outside_the_vocabulary_is_off(top_k: int) -> None:
    logits = random_logits(50)
    specs = [(spec(seed=seed, top_k=top_k), spec(seed=seed)) for seed in range(50)]
    for with_k, without in specs:
        assert choose(logits, with_k)[0].token_id == choose(logits, without)[0].token_id


def test_a_row_with_nan_fails_alone() -> None:
    good, bad = random_logits(100), random_logits(100)
    bad[99] = math.nan
    got = Sampler().sample(torch.stack([good, bad, good]), rows(spec(), spec(temperature=0.0), spec()))
    assert got[1].error.startswith("NUMERICAL_ERROR: ")
    assert [r.error for r in (got[0], got[2])] == [None, None]
    assert got[0].token_id == got[2].token_id == reference_choice(good, spec())[0]


def test_a_row_without_any_possible_token_fails_with_a_reason() -> None:
    (got,) = choose(torch.full((5,), -math.inf), spec())
    assert got.error.startswith("NUMERICAL_ERROR: ")


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.1}])
@pytest.mark.parametrize("place", [0, 1, 99])
def test_a_row_with_an_infinite_logit_fails_alone(changes: dict, place: int) -> None:
    """Whatever it means, it is no probability; -infinity is one, of a token that is never chosen."""
    good, bad = random_logits(100), random_logits(100)
    good[place], bad[place] = -math.inf, math.inf
    got = Sampler().sample(torch.stack([bad, good]), rows(spec(**changes), spec(**changes)))
    assert got[0].error == "NUMERICAL_ERROR: the logits of token 0 are not finite numbers."
    assert got[1].error is None
    assert got[1].token_id == reference_choice(good, spec(**changes))[0] != place


@pytest.mark.parametrize("temperature", [1e-5, 0.5, 1.0])
def test_logits_near_the_largest_float_are_finite(temperature: float) -> None:
    logits = torch.tensor([3.0e38, -3.0e38, 0.0, -math.inf])
    (got,) = choose(logits, spec(temperature=temperature))
    assert (got.error, got.token_id) == (None, 0)


def test_what_one_rows_processing_raises_ends_that_row_only() -> None:
    def fault(uid: int, index: int) -> None:
        if (uid, index) == (11, 0):
            raise RuntimeError("made to fail")

    logits = random_logits(100)
    got = Sampler(on_row=fault).sample(logits.expand(3, -1).contiguous(), rows(spec(), spec(), spec()))
    assert got[1].error == "POISONED_REQUEST: sampling raised RuntimeError: made to fail"
    assert [(r.uid, r.token_id, r.error) for r in (got[0], got[2])] == [
        (uid, reference_choice(logits, spec())[0], None) for uid in (10, 12)
    ]


def test_only_rows_that_sample_get_a_result_and_logprobs_only_where_asked() -> None:
    logits = torch.stack([random_logits(60), random_logits(60, seed=1)])
    got = Sampler().sample(logits, rows(spec(logprob=False), None, spec()))
    assert [r.uid for r in got] == [10, 12]
    assert got[0].logprob is None
    assert got[1].logprob is not None
    assert got[1].token_id == reference_choice(logits[1], spec())[0]


def drafted(drafts: tuple[int, ...], first: SampleSpec) -> RowPlan:
    tokens = array("i", [1])
    return RowPlan(uid=7, tokens=tokens, start=0, num_tokens=1 + len(drafts), tables=(), sample=first, drafts=drafts)


@pytest.mark.parametrize("changes", PROCESSORS)
@pytest.mark.parametrize("num_right", range(5))
def test_drafts_bring_the_tokens_that_steps_of_one_token_would_have_brought(num_right: int, changes: dict) -> None:
    logits = torch.stack([random_logits(300, seed=place) for place in range(6)])
    wanted = [reference_choice(logits[place], spec(index=40 + place, **changes)) for place in range(5)]
    drafts = [token for token, _ in wanted[:4]]
    if num_right < 4:
        drafts[num_right] = (drafts[num_right] + 1) % 300
    row = drafted(tuple(drafts), spec(index=40, **changes))
    *got, neighbour = Sampler().sample(logits, [row, *rows(spec(index=3, **changes))])
    assert [(r.uid, r.token_id, r.error) for r in got] == [(7, token, None) for token, _ in wanted[: num_right + 1]]
    assert [r.logprob for r in got] == pytest.approx([logprob for _, logprob in wanted[: num_right + 1]], abs=1e-4)
    assert neighbour.token_id == reference_choice(logits[5], spec(index=3, **changes))[0]


def test_a_fault_behind_drafts_that_hold_comes_after_their_tokens() -> None:
    logits = torch.stack([random_logits(300, seed=place) for place in range(4)])
    drafts = tuple(reference_choice(logits[place], spec(index=place))[0] for place in range(3))
    logits[2] = float("nan")
    got = Sampler().sample(logits, [drafted(drafts, spec())])
    assert [r.token_id for r in got[:2]] == list(drafts[:2])
    assert [r.error for r in got] == [None, None, "NUMERICAL_ERROR: the logits of token 2 are not finite numbers."]


@pytest.mark.parametrize("logits", [torch.zeros(2, 5), torch.zeros(5), torch.zeros(1, 5, dtype=torch.float64)])
def test_logits_that_do_not_match_the_rows_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="1 places are wanted"):
        Sampler().sample(logits, rows(spec()))
