"""Penalties, biases and bans: every edge of their values, and what the worker is sent of them."""

from __future__ import annotations

import math
from array import array

import msgspec
import pytest
from chairlift_service.defaults import RequestDefaults
from chairlift_service.processors import MAX_BANNED, MAX_BANNED_LEN
from chairlift_service.text.tokenizer import Tokenizer
from chairlift_service.validate import ValidRequest
from chairlift_worker.ipc.messages import ProcessorsMsg
from support import tokenizer_files as made
from support.processors import make_processors
from support.validation import MODEL, at, refusal, valid

WIDE = msgspec.structs.replace(MODEL, vocab_size=1000)
BYTES = Tokenizer(backend=made.byte_fallback())
FILE = RequestDefaults(
    repetition_penalty=1.5, no_repeat_ngram_size=3, banned_sequences=((5, 6),), banned_token_ids=(4,), min_new_tokens=2
)


def sent(got: ValidRequest) -> ProcessorsMsg:
    assert got.sampling.processors is not None
    return got.sampling.processors


async def test_what_asks_for_nothing_costs_the_worker_nothing() -> None:
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "no_repeat_ngram_size": 0}
    for sampling in ({}, neutral, {"logit_bias": {5: 0.0}}):
        assert (await valid(sampling=sampling, stop={"min_new_tokens": 0})).sampling.processors is None
    assert (await valid(stop={"min_new_tokens": 3, "ignore_eos": True})).sampling.processors is None


async def test_all_of_it_reaches_the_worker() -> None:
    got = await valid(
        sampling={
            "temperature": 0.5,
            "repetition_penalty": 1.25,
            "presence_penalty": -2,
            "frequency_penalty": 2,
            "no_repeat_ngram_size": 2**32 - 1,
            "logit_bias": {99: -100, 0: 100},
            "allowed_token_ids": [0, 99, 1, 2],
            "banned_token_ids": [1],
            "banned_words": ["up hop"],
            "banned_sequences": [{"ids": [9, 8]}, {"ids": [7]}],
        },
        stop={"min_new_tokens": 2, "token_ids": [3]},
    )
    assert sent(got) == make_processors(
        logit_bias={0: 100.0, 99: -100.0},
        repetition_penalty=1.25,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        no_repeat_ngram_size=2**32 - 1,
        banned_sequences=[(9, 8), (7,), (1, 4)],
        min_new_tokens=2,
        early_stop_ids=[7, 8, 3],
        allowed_ids=[0, 99, 1, 2],
        banned_ids=[1],
    )
    told = got.processors
    assert (told.repetition_penalty, told.presence_penalty, told.frequency_penalty) == (1.25, -2, 2)
    assert dict(told.logit_bias) == {99: -100, 0: 100}
    assert (list(told.allowed_token_ids), list(told.banned_token_ids)) == ([0, 99, 1, 2], [1])
    assert (list(told.banned_words), got.min_new_tokens) == (["up hop"], 2)


BAD = [
    *(("repetition_penalty", value) for value in (0, -1, -0.0, math.nan, math.inf, -math.inf)),
    *(
        (name, value)
        for name in ("presence_penalty", "frequency_penalty")
        for value in (2.001, -2.001, math.nan, math.inf, -math.inf)
    ),
]


@pytest.mark.parametrize(("name", "value"), BAD)
async def test_a_penalty_out_of_range_is_refused_by_path(name: str, value: float) -> None:
    assert at(await refusal(sampling={name: value})) == [("INVALID_VALUE", f"request.sampling.{name}")]


@pytest.mark.parametrize("value", [1e-30, 3e38])
async def test_any_number_above_zero_is_a_repetition_penalty(value: float) -> None:
    assert sent(await valid(sampling={"repetition_penalty": value})).repetition_penalty == pytest.approx(value)


@pytest.mark.parametrize("bad", [-1, 100, 2**31, -(2**63), 2**63 - 1])
async def test_an_id_outside_the_vocabulary_is_refused_wherever_it_stands(bad: int) -> None:
    """V is that of the output layer: the tokenizer here has 6 tokens."""
    where = {
        "logit_bias": ({99: 1.0, bad: 1.0}, f"[{bad}]"),
        "allowed_token_ids": ([0, bad], "[1]"),
        "banned_token_ids": ([99, 0, bad], "[2]"),
        "banned_sequences": ([{"ids": [1]}, {"ids": [99, bad]}], "[1].ids[1]"),
    }
    for name, (value, place) in where.items():
        error = await refusal(sampling={name: value}, path="requests[1]")
        assert at(error) == [("UNKNOWN_TOKEN_ID", f"requests[1].sampling.{name}{place}")]
        assert str(bad) in error.message


@pytest.mark.parametrize("bias", [100.001, -100.001, math.nan, math.inf, -math.inf])
async def test_a_bias_out_of_range_is_refused_by_id(bias: float) -> None:
    assert at(await refusal(sampling={"logit_bias": {3: 1, 7: bias}})) == [
        ("INVALID_VALUE", "request.sampling.logit_bias[7]")
    ]


async def test_of_many_bad_entries_some_are_named() -> None:
    bias = dict.fromkeys(range(50), 1000.0)
    assert 1 <= len((await refusal(sampling={"logit_bias": bias})).violations) <= 32
    assert at(await refusal(sampling={"banned_token_ids": [1] * 101})) == [
        ("INVALID_VALUE", "request.sampling.banned_token_ids")
    ]


@pytest.mark.parametrize(
    ("sampling", "stop"),
    [
        ({"allowed_token_ids": [5], "banned_token_ids": [5]}, {}),
        ({"allowed_token_ids": [5], "banned_sequences": [{"ids": [5]}]}, {}),
        ({"allowed_token_ids": [1], "banned_words": ["up"]}, {}),
        ({"allowed_token_ids": [7, 8]}, {"min_new_tokens": 1}),
        ({"allowed_token_ids": [7, 8, 9]}, {"min_new_tokens": 1, "token_ids": [9]}),
        ({"banned_token_ids": list(range(100))}, {}),
    ],
)
async def test_what_leaves_nothing_to_choose_is_refused(sampling: dict, stop: dict) -> None:
    error = await refusal(sampling=sampling, stop=stop)
    assert at(error) == [("INVALID_VALUE", "request.sampling.allowed_token_ids")]


async def test_one_token_is_enough_to_choose_from() -> None:
    await valid(sampling={"banned_token_ids": list(range(1, 100))})
    await valid(sampling={"allowed_token_ids": [7, 8]})
    await valid(sampling={"allowed_token_ids": [7, 8]}, stop={"min_new_tokens": 1, "ignore_eos": True})


# --- banned words ---


async def test_a_word_is_banned_as_the_tokenizer_writes_it_with_and_without_a_space() -> None:
    backend = made.byte_fallback()
    for word in ("the", "  the", "don't", "\n", " "):
        got = await valid(sampling={"banned_words": [word]}, tokenizer=BYTES, model=WIDE)
        bare = word.lstrip(" ") or word
        wanted = {tuple(backend.encode(form, add_special_tokens=False).ids) for form in (bare, f" {bare}")}
        assert sent(got) == make_processors(banned_sequences=sequences_of(got)), "and nothing else"
        assert set(sequences_of(got)) == wanted
        assert not any(ids[0] == 1 for ids in wanted), "BOS is no part of a word"


def sequences_of(got: ValidRequest) -> list[tuple[int, ...]]:
    ids, found = array("i", sent(got).banned_sequences).tolist(), []
    while ids:
        found.append(tuple(ids[1 : 1 + ids[0]]))
        ids = ids[1 + ids[0] :]
    return found


async def test_words_that_say_the_same_are_banned_once() -> None:
    got = await valid(sampling={"banned_words": ["up", " up", "up"], "banned_sequences": [{"ids": [1]}]})
    assert sequences_of(got) == [(1,)]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["up", ""], "[1]"),
        (["x" * (MAX_BANNED_LEN + 1)], "[0]"),
        (["up"] * (MAX_BANNED + 1), ""),
    ],
)
async def test_too_many_too_long_and_empty_words_are_refused(words: list[str], place: str) -> None:
    error = await refusal(sampling={"banned_words": words})
    assert at(error) == [("INVALID_VALUE", f"request.sampling.banned_words{place}")]


async def test_as_many_words_as_there_may_be_are_taken() -> None:
    await valid(sampling={"banned_words": ["up"] * MAX_BANNED})
    await valid(sampling={"banned_words": ["a" * MAX_BANNED_LEN]}, tokenizer=BYTES, model=WIDE)


@pytest.mark.parametrize(
    ("sequences", "place"),
    [
        ([{"ids": [1]}, {}], "[1]"),
        ([{"ids": [1] * (MAX_BANNED_LEN + 1)}], "[0]"),
        ([{"ids": [1]}] * (MAX_BANNED + 1), ""),
    ],
)
async def test_too_many_too_long_and_empty_sequences_are_refused(sequences: list, place: str) -> None:
    error = await refusal(sampling={"banned_sequences": sequences})
    assert at(error) == [("INVALID_VALUE", f"request.sampling.banned_sequences{place}")]


# --- the model's own ---


async def test_the_models_own_hold_where_nothing_is_asked() -> None:
    got = await valid(defaults=FILE)
    assert sent(got) == make_processors(
        repetition_penalty=1.5,
        no_repeat_ngram_size=3,
        banned_sequences=[(5, 6)],
        banned_ids=[4],
        min_new_tokens=2,
        early_stop_ids=[7, 8],
    )
    told = got.processors
    assert (told.repetition_penalty, told.no_repeat_ngram_size, list(told.banned_token_ids)) == (1.5, 3, [4])
    assert [list(banned.ids) for banned in told.banned_sequences] == [[5, 6]]
    assert got.min_new_tokens == 2


async def test_what_is_asked_holds_in_their_place() -> None:
    asked = {"repetition_penalty": 1, "no_repeat_ngram_size": 0, "banned_token_ids": [9]}
    got = await valid(defaults=FILE, sampling={**asked, "banned_sequences": [{"ids": [3]}]}, stop={"min_new_tokens": 0})
    assert sent(got) == make_processors(banned_sequences=[(3,)], banned_ids=[9])


# --- min_new_tokens ---


@pytest.mark.parametrize(
    ("asked", "most", "context", "expected"),
    [(0, 5, 16, 0), (5, 5, 16, 5), (1, None, 16, 1), (13, None, 16, 13), (14, None, 16, 13), (9, 20, 8, 5)],
)
async def test_min_new_tokens_is_at_most_what_fits(asked: int, most: int | None, context: int, expected: int) -> None:
    fields = {} if most is None else {"max_new_tokens": most}
    model = msgspec.structs.replace(MODEL, context_len=context)
    got = await valid(stop={"min_new_tokens": asked}, model=model, **fields)
    assert got.min_new_tokens == expected
    assert (got.sampling.processors is not None) == (expected > 0)


async def test_more_than_max_new_tokens_is_refused() -> None:
    for fields in ({"max_new_tokens": 5}, {"defaults": RequestDefaults(max_new_tokens=5)}):
        error = await refusal(stop={"min_new_tokens": 6}, **fields)
        assert at(error) == [("INVALID_VALUE", "request.stop.min_new_tokens")]


async def test_the_models_own_minimum_gives_way_to_max_new_tokens() -> None:
    assert (await valid(defaults=RequestDefaults(min_new_tokens=9), max_new_tokens=5)).min_new_tokens == 5
    assert (await valid(defaults=RequestDefaults(min_total_tokens=9), max_new_tokens=7)).min_new_tokens == 6
