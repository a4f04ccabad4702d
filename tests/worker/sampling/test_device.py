"""The device's sampler, on the CPU: the native sampler's choices, and the definition's noise bit by bit."""

from __future__ import annotations

import math
import random
from array import array

import numpy as np
import pytest
import torch
from chairlift_worker.faults import InjectedFaultError
from chairlift_worker.plan import RowPlan, RowResult, SampleSpec
from chairlift_worker.sampling import Sampler
from chairlift_worker.sampling import device as device_module
from chairlift_worker.sampling.device import DeviceSampler, is_for_device
from chairlift_worker.sampling.noise import gumbel, uniform_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling_reference import gumbel_noise, noise_bits, processed

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def spec(**changes: object) -> SampleSpec:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "index": 0, "logprob": True}
    return SampleSpec(**{**neutral, **changes})


def row(uid: int, sample: SampleSpec | None, drafts: tuple[int, ...] = ()) -> RowPlan:
    return RowPlan(
        uid=uid, tokens=array("i"), start=0, num_tokens=1 + len(drafts), tables=(), sample=sample, drafts=drafts
    )


def rows(*specs: SampleSpec | None) -> list[RowPlan]:
    return [row(10 + number, sample) for number, sample in enumerate(specs)]


def choose(logits: torch.Tensor, wanted: list[RowPlan], device: str = "cpu") -> tuple[RowResult, ...]:
    sampler = DeviceSampler()
    return sampler.results(sampler.sample(logits.to(device), wanted).packed.cpu(), wanted)


def expect_equal(got: tuple[RowResult, ...], wanted: tuple[RowResult, ...]) -> None:
    assert [(result.uid, result.token_id, result.error) for result in got] == [
        (result.uid, result.token_id, result.error) for result in wanted
    ]
    for one, other in zip(got, wanted, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=2e-6, rel=1e-6)


def random_spec(generator: random.Random, vocab_size: int) -> SampleSpec:
    return spec(
        temperature=generator.choice([0.0, 9.9e-6, 1e-5, 0.3, 0.7, 1.0, 1.9, 100.0]),
        top_k=generator.choice([0, 0, 1, 2, 40, vocab_size - 1, vocab_size, vocab_size + 1, 2**40]),
        top_p=generator.choice([1.0, 1.0, 0.95, 0.5, 0.1, 0.0]),
        min_p=generator.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
        seed=generator.choice([0, 1, 2**32 + 5, 2**63, 2**64 - 1, generator.randrange(2**64)]),
        index=generator.choice([0, 1, 77, 2**33]),
        logprob=generator.random() < 0.7,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 128, 5001])
def test_noise_is_that_of_the_definition_bit_by_bit(vocab_size: int, device: str) -> None:
    seeds, indices = [0, 3, 2**32 + 5, 2**63, 2**64 - 1], [0, 1, 2**33, 2**31, 7]
    as_tensor = torch.frombuffer(array("Q", seeds), dtype=torch.int64)
    bits = uniform_bits(
        vocab_size=vocab_size, seeds=as_tensor.to(device), indices=torch.tensor(indices, device=device)
    ).cpu()
    for number, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        assert bits[number].tolist() == noise_bits(vocab_size, seed, index).tolist()
        np.testing.assert_allclose(
            gumbel(bits[number]).numpy(), gumbel_noise(vocab_size, seed, index), rtol=1e-14, atol=1e-14
        )


@pytest.mark.parametrize("device", DEVICES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_tokens_are_those_of_the_native_sampler(seed: int, device: str) -> None:
    generator = random.Random(seed)
    vocab_size = generator.choice([1, 2, 3, 127, 383, 4000])
    wanted = rows(*(random_spec(generator, vocab_size) for _ in range(generator.choice([1, 5, 16]))))
    logits = torch.randn(len(wanted), vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    logits[generator.randrange(len(wanted)), : vocab_size // 2] = -math.inf
    expect_equal(choose(logits, wanted, device), Sampler().sample(logits, wanted))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_of_equal_logits_the_same_are_kept_and_the_lowest_id_wins(seed: int) -> None:
    generator = random.Random(seed)
    wanted = rows(*(random_spec(generator, 12) for _ in range(8)))
    logits = torch.randint(0, 3, (8, 12), generator=torch.Generator().manual_seed(seed)).float()
    expect_equal(choose(logits, wanted), Sampler().sample(logits, wanted))


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.4}, {"top_k": 30, "top_p": 0.5}])
def test_exactly_the_tokens_that_transformers_keeps_are_ever_chosen(changes: dict) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(8))
    kept = set(torch.nonzero(processed(logits, spec(**changes)) > -math.inf).flatten().tolist())
    drawn = choose(logits.expand(3000, -1).contiguous(), rows(*(spec(seed=seed, **changes) for seed in range(3000))))
    assert {result.token_id for result in drawn} == kept


def test_a_row_that_cannot_be_sampled_is_marked_and_its_neighbours_are_not() -> None:
    logits = torch.zeros(5, 7)
    logits[0, 3] = math.nan
    logits[1, 2] = math.inf
    logits[2] = -math.inf
    for wanted in (rows(*[spec(temperature=0.0)] * 5), rows(*[spec(top_p=0.5, top_k=3)] * 5)):
        got = choose(logits, wanted)
        expect_equal(got, Sampler().sample(logits, wanted))
        assert [result.error is None for result in got] == [False, False, False, True, True]
        failed = DeviceSampler().sample(logits, wanted).tokens[:3]
        assert failed.tolist() == [0, 0, 0], "what the next step may be given is a token"


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 3e38])
def test_quotients_out_of_range_are_distances(temperature: float) -> None:
    logits = torch.tensor([[1e10, 3e38, -3e38, 0.0], [-3e38, -2e38, -1e38, -math.inf]])
    wanted = rows(spec(temperature=temperature), spec(temperature=temperature, top_p=0.5))
    expect_equal(choose(logits, wanted), Sampler().sample(logits, wanted))


@pytest.mark.parametrize("drafts", [(), (3,), (3, 1), (3, 1, 1), (2, 1), (3, 2, 1)])
def test_drafts_hold_as_far_as_the_native_sampler_says(drafts: tuple[int, ...]) -> None:
    logits = torch.tensor([[0.0, 0, 0, 9], [0, 9, 0, 0], [0, 9, 0, 0], [9, 0, 0, 0]])[: 1 + len(drafts)]
    both = torch.cat([torch.zeros(1, 4), logits])
    wanted = [row(1, spec(temperature=0.0)), row(2, spec(temperature=0.01, index=5), drafts), row(3, None)]
    expect_equal(choose(both, wanted), Sampler().sample(both, wanted))


def test_rows_are_the_same_in_pieces_and_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(5)
    wanted = rows(*(random_spec(generator, 300) for _ in range(20)))
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1))
    whole = choose(logits, wanted)
    monkeypatch.setattr(device_module, "CHUNK", 900)
    assert choose(logits, wanted) == whole


def test_what_a_hook_raises_is_one_rows_error() -> None:
    def fail(uid: int, index: int) -> None:
        if (uid, index) == (11, 4):
            raise InjectedFaultError("on purpose")

    wanted, logits = rows(spec(), spec(index=4), spec(index=4)), torch.zeros(3, 9)
    sampler = DeviceSampler(on_row=fail)
    got = sampler.results(sampler.sample(logits, wanted).packed, wanted)
    assert got == Sampler(on_row=fail).sample(logits, wanted)
    assert [result.error is None for result in got] == [True, False, True]


def test_logits_that_do_not_match_are_refused_and_no_rows_are_none() -> None:
    for logits in (torch.zeros(2, 5), torch.zeros(1, 5).double(), torch.zeros(5)):
        with pytest.raises(ValueError, match="1 places are wanted"):
            DeviceSampler().sample(logits, rows(spec()))
    assert choose(torch.zeros(0, 5), rows(None)) == ()


def test_rows_with_nothing_but_the_four_filters_are_for_the_device() -> None:
    assert is_for_device(rows(spec(top_k=3, top_p=0.2, min_p=0.1, temperature=2.0), None))
