"""The processors against transformers' own, those that it lacks against plain torch."""

import math
import random
from array import array

import pytest
import torch
from chairlift_worker.plan import RowPlan, RowResult, SampleSpec
from chairlift_worker.sampling import Sampler
from support.processors import make_processors, penalised
from support.sampling_reference import reference_choice

VOCAB = 60
TOKENS = [5, 9, 5, 7, 5, 9, 5, 7, 9, 9, 3, 5, 9]  # the last four are output
NUM_OUTPUT = 4
EACH = [
    {"logit_bias": {0: 100.0, 59: -100.0, 5: 1.5}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.4},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 1.25},
    {"frequency_penalty": -0.75, "presence_penalty": 0.5},
    *({"no_repeat_ngram_size": size} for size in (1, 2, 3, len(TOKENS), len(TOKENS) + 1, 2**32 - 1)),
    {"banned_sequences": [[4], [9, 8], [5, 9, 11], [9, 9, 12], [3, 5, 9, 13]]},
    {"banned_sequences": [[*TOKENS, 14], [1, *TOKENS, 15]]},  # as long as all that is there, and longer
    {"min_new_tokens": NUM_OUTPUT, "early_stop_ids": [1, 2]},  # reached
    {"min_new_tokens": NUM_OUTPUT + 1, "early_stop_ids": [1, 2]},
    {"allowed_ids": [3]},
    {"allowed_ids": [59, 0, 3, 3]},
    {"banned_ids": [0, 59, 59]},
]
TOGETHER = {name: value for changes in EACH for name, value in changes.items() if name != "allowed_ids"}
TOGETHER |= {"no_repeat_ngram_size": 2, "allowed_ids": list(range(40)), "repetition_penalty": 1.2}


def spec(changes: dict, **sampling: object) -> SampleSpec:
    neutral = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "logprob": True}
    return SampleSpec(**{"index": NUM_OUTPUT, **neutral, **sampling}, processors=make_processors(**changes))


def row(sample: SampleSpec, tokens: list[int] = TOKENS, **changes: object) -> RowPlan:
    plan = {"uid": 3, "tokens": array("i", tokens), "start": len(tokens) - 1, "num_tokens": 1, "tables": ()}
    return RowPlan(**{**plan, "sample": sample, **changes})


def random_logits(size: int = VOCAB, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 4


def choose(logits: torch.Tensor, *rows: RowPlan, **arguments: object) -> tuple[RowResult, ...]:
    return Sampler().sample(logits.expand(len(rows), -1).contiguous(), rows, **arguments)


def scores_of(logits: torch.Tensor, sample: SampleSpec, tokens: list[int] = TOKENS) -> list[tuple[int, float]]:
    """All that are left, by the sampler's own account: ids in order of likelihood, and log-probabilities."""
    everything = {"temperature": 0.0, "num_top": 128}
    asked = SampleSpec(**{name: everything.get(name, getattr(sample, name)) for name in sample.__struct_fields__})
    (got,) = choose(logits, row(asked, tokens))
    assert got.error is None
    assert got.top is not None
    return list(zip(array("i", got.top.ids), array("f", got.top.logprobs), strict=True))


@pytest.mark.parametrize("changes", [*EACH, TOGETHER])
def test_what_is_left_of_a_row_is_what_transformers_leaves(changes: dict) -> None:
    for seed in range(5):
        logits = random_logits(seed=seed)
        wanted = penalised(logits, make_processors(**changes), TOKENS, NUM_OUTPUT).double().log_softmax(-1)
        got = dict(scores_of(logits, spec(changes)))
        assert set(got) == set(torch.nonzero(wanted > -math.inf).flatten().tolist())
        assert got == {token: pytest.approx(float(wanted[token]), abs=1e-4) for token in got}


@pytest.mark.parametrize("changes", [*EACH, TOGETHER])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}])
def test_token_and_logprob_are_those_of_transformers(changes: dict, sampling: dict) -> None:
    for seed in range(10):
        logits, asked = random_logits(seed=seed), spec(changes, seed=seed, **sampling)
        token, logprob = reference_choice(logits, asked, TOKENS)
        (got,) = choose(logits, row(asked))
        assert (got.token_id, got.error) == (token, None)
        assert got.logprob == pytest.approx(logprob, abs=1e-4)


def test_random_histories_give_what_transformers_gives() -> None:
    generator = random.Random(1)
    for _ in range(200):
        tokens = [generator.randrange(8) for _ in range(generator.randint(1, 40))]
        num_output = generator.randint(0, len(tokens) - 1)
        changes = {
            "repetition_penalty": generator.choice([1.0, 1.1, 0.8]),
            "presence_penalty": generator.choice([0.0, 1.0]),
            "frequency_penalty": generator.choice([0.0, -0.5]),
            "no_repeat_ngram_size": generator.randint(0, 4),
            "banned_sequences": [[generator.randrange(8) for _ in range(size)] for size in (1, 2, 2, 3)],
        }
        sample = spec(changes, index=num_output)
        wanted = penalised(random_logits(), sample.processors, tokens, num_output).double().log_softmax(-1)
        got = dict(scores_of(random_logits(), sample, tokens))
        assert got == {
            token: pytest.approx(float(value), abs=1e-4)
            for token, value in enumerate(wanted.tolist())
            if value > -math.inf
        }


def test_penalties_of_the_output_let_the_prompt_be() -> None:
    logits, tokens = torch.zeros(VOCAB), [1, 2, 3, 4]
    got = dict(scores_of(logits, spec({"presence_penalty": 1.0, "frequency_penalty": 1.0}, index=2), tokens))
    assert got[1] == got[2] == got[50]
    assert got[3] == got[4] == pytest.approx(got[50] - 2)
    got = dict(scores_of(logits + 1, spec({"repetition_penalty": 2.0}, index=2), tokens))
    assert got[1] == got[4] == pytest.approx(got[50] - 0.5)


@pytest.mark.parametrize("changes", [*EACH, TOGETHER])
def test_a_place_behind_drafts_sees_the_drafts(changes: dict) -> None:
    logits = torch.stack([random_logits(seed=place) for place in range(4)])
    for sampling in ({}, {"temperature": 1.5}):
        tokens, drafts, wanted = list(TOKENS), [], []
        for place in range(4):
            wanted.append(reference_choice(logits[place], spec(changes, index=NUM_OUTPUT + place, **sampling), tokens))
            tokens.append(wanted[-1][0])
            drafts.append(wanted[-1][0])
        one = row(spec(changes, **sampling), num_tokens=4, drafts=tuple(drafts[:3]))
        got = Sampler().sample(logits, [one])
        assert [result.token_id for result in got] == [token for token, _ in wanted]
        assert [result.logprob for result in got] == pytest.approx([logprob for _, logprob in wanted], abs=1e-4)


@pytest.mark.parametrize("changes", [*EACH, TOGETHER])
def test_a_carried_token_is_seen_like_any_other(changes: dict) -> None:
    logits, sample = random_logits(), spec(changes)
    (known,) = choose(logits, row(sample))
    carrying = row(sample, TOKENS[:-1], start=len(TOKENS) - 1, carry=True)
    assert choose(logits, carrying, carried={3: TOKENS[-1]}) == (known,)


def test_tokens_that_were_appended_while_the_step_was_in_flight_are_not_seen() -> None:
    logits, sample = random_logits(), spec(TOGETHER)
    known = row(sample)
    later = row(sample, [*TOKENS, 1, 2], start=len(TOKENS) - 1)
    assert choose(logits, later) == choose(logits, known)


def test_rows_of_one_batch_keep_their_own() -> None:
    logits = random_logits()
    rows = [row(spec(changes, temperature=1.2), [*TOKENS, *([1] * i)], uid=i) for i, changes in enumerate(EACH)]
    plain = row(SampleSpec(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=1, index=4, logprob=True))
    alone = [choose(logits, each)[0] for each in [*rows, plain]]
    assert list(choose(logits, *rows, plain)) == alone
    assert list(choose(logits, plain, *reversed(rows))) == alone[::-1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1e-5}, {"temperature": 1.0}, {"temperature": 100.0}])
@pytest.mark.parametrize("penalty", [1e-38, 1e-6, 1e6, 3e38])
def test_extreme_penalties_give_a_token_with_a_finite_logprob(penalty: float, sampling: dict) -> None:
    asked = {"repetition_penalty": penalty, "banned_ids": [0, 1], "logit_bias": {5: 100.0}}
    for scale in (1.0, 1e30, 1e37):
        (got,) = choose(random_logits() * scale, row(spec(asked, num_top=128, **sampling)))
        assert got.error is None
        assert got.token_id > 1
        assert got.top is not None
        assert all(math.isfinite(value) for value in (got.logprob, *array("f", got.top.logprobs)))


def test_what_the_model_itself_excludes_stays_so() -> None:
    logits = random_logits()
    logits[[5, 9]] = -math.inf
    for changes in ({"logit_bias": {5: 100.0, 9: 1.0}}, {"repetition_penalty": 1e-9}, {"presence_penalty": -2.0}):
        assert not {5, 9} & set(dict(scores_of(logits, spec(changes))))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_gives_no_numbers_is_found_out_though_the_token_is_excluded(value: float) -> None:
    logits = random_logits()
    logits[7] = value
    (got,) = choose(logits, row(spec({"banned_ids": [7], "allowed_ids": [3]})))
    assert got.error == "NUMERICAL_ERROR: the logits of token 4 are not finite numbers."


def test_a_row_of_which_nothing_is_left_fails_alone() -> None:
    logits = random_logits()
    none, good = row(spec({"allowed_ids": [3], "banned_ids": [3]})), row(spec({}))
    got = choose(logits, none, good)
    assert got[0].error == "NUMERICAL_ERROR: no token has any probability at token 4."
    assert got[1].token_id == int(logits.argmax())


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1])
@pytest.mark.parametrize("where", ["banned_ids", "allowed_ids", "logit_bias", "banned_sequences", "early_stop_ids"])
def test_an_id_outside_the_row_fails_alone_and_writes_nowhere(where: str, bad: int) -> None:
    value = {"logit_bias": {bad: 1.0}, "banned_sequences": [[1, bad]]}.get(where, [3, bad])
    logits = random_logits()
    got = choose(logits, row(spec({})), row(spec({where: value})), row(spec({})))
    assert got[1].error == f"POISONED_REQUEST: sampling raised ValueError: a token id is outside the {VOCAB} logits"
    assert got[0] == got[2]
    assert got[0].token_id == int(logits.argmax())


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits()[None].contiguous()
    before = logits.clone()
    Sampler().sample(logits, [row(spec(TOGETHER))])
    assert torch.equal(logits, before)
