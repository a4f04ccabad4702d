"""Every edge of "what a value means", each with the status, the field path and the value that come of it."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from chairlift.v1 import event_pb2, request_pb2
from chairlift_service.constraints import Constraints
from chairlift_service.defaults import RequestDefaults
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.prompt import check_token_ids
from chairlift_service.text.tokenizer import Tokenizer
from chairlift_service.validate import ValidRequest, validate
from support import tokenizer_files as made
from support.validation import MODEL, TOKENIZER, at, refusal, valid

GREEDY = RequestDefaults()
SAMPLING = RequestDefaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=0.05)
WORDS_ADDING_BOS = Tokenizer(backend=made.byte_fallback())


async def test_a_priority_is_ten_levels_up_or_down_at_most() -> None:
    assert [(await valid(priority=level)).priority for level in (-10, 0, 10)] == [-10, 0, 10]
    assert (await valid()).priority == 0
    for level in (-11, 11, -(2**31)):
        assert at(await refusal(priority=level, path="requests[1]")) == [("INVALID_VALUE", "requests[1].priority")]


# --- prompt ---


async def test_token_ids_are_used_as_they_are() -> None:
    got = await valid(token_ids={"ids": [99, 0, 5]})
    assert list(got.prompt_ids) == [99, 0, 5]
    assert got.prompt_ids.typecode == "i"
    assert got.num_prompt_tokens == 3


async def test_text_is_tokenised_with_the_tokens_that_the_tokenizer_adds() -> None:
    assert list((await valid(text="up and hop")).prompt_ids) == [1, 2, 4]
    model = msgspec.structs.replace(MODEL, vocab_size=1000)
    got = await valid(text="the", tokenizer=WORDS_ADDING_BOS, model=model)
    assert list(got.prompt_ids) == made.byte_fallback().encode("the").ids
    assert got.prompt_ids[0] == 1


async def test_no_input_is_refused() -> None:
    with pytest.raises(ServiceError) as caught:
        await validate(
            request_pb2.GenerationRequest(),
            path="requests[2]",
            model=MODEL,
            tokenizer=TOKENIZER,
            chat=None,
            defaults=GREEDY,
            constraints=Constraints(),
        )
    assert at(caught.value) == [("MISSING_INPUT", "requests[2]")]


@pytest.mark.parametrize(
    ("fields", "path"),
    [({"text": ""}, "request.text"), ({"text": "  "}, "request.text"), ({"token_ids": {}}, "request.token_ids")],
)
async def test_a_prompt_without_tokens_is_refused(fields: dict, path: str) -> None:
    assert at(await refusal(**fields)) == [("EMPTY_PROMPT", path)]


async def test_only_a_bos_token_is_a_prompt() -> None:
    model = msgspec.structs.replace(MODEL, vocab_size=1000)
    assert list((await valid(text="", tokenizer=WORDS_ADDING_BOS, model=model)).prompt_ids) == [1]


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, 2**31, 2**32 + 1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("index", [0, 2])
async def test_an_id_outside_the_vocabulary_is_refused_by_path_and_value(bad: int, index: int) -> None:
    ids = [1, 2, 3]
    ids[index] = bad
    error = await refusal(token_ids={"ids": ids}, path="requests[3]")
    assert at(error) == [("UNKNOWN_TOKEN_ID", f"requests[3].token_ids.ids[{index}]")]
    assert str(bad) in error.message
    assert error.metadata["vocab_size"] == "100"


async def test_ids_that_the_tokenizer_knows_but_the_model_does_not_are_refused() -> None:
    error = await refusal(text="up and hop", model=msgspec.structs.replace(MODEL, vocab_size=4))
    assert at(error) == [("UNKNOWN_TOKEN_ID", "request.text")]


@pytest.mark.parametrize(("context", "cache", "fits"), [(4, 3, True), (3, 99, False), (99, 2, False), (99, 3, True)])
async def test_prompt_and_one_token_must_fit_the_context_and_the_prompt_the_cache(context, cache, fits) -> None:
    model = msgspec.structs.replace(MODEL, context_len=context, cache_len=cache)
    if fits:
        assert (await valid(model=model)).max_new_tokens >= 1
        return
    error = await refusal(model=model)
    assert at(error) == [("PROMPT_TOO_LONG", "request.token_ids")]
    assert error.metadata == {"prompt_tokens": "3", "context_len": str(context), "cache_len": str(cache)}


async def test_a_text_too_long_for_any_tokenizer_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_args: object, **_kwargs: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(TOKENIZER, "encode_async", never)
    error = await refusal(text="up " * 1_000_000)
    assert at(error) == [("PROMPT_TOO_LONG", "request.text")]
    assert error.metadata["context_len"] == "16"


async def test_the_longest_text_that_could_fit_is_tokenised() -> None:
    # The longest token is "<pad>": 5 bytes, and 16 tokens of context.
    assert at(await refusal(text=" " * 80)) == [("EMPTY_PROMPT", "request.text")]
    assert at(await refusal(text=" " * 81)) == [("PROMPT_TOO_LONG", "request.text")]


# --- length ---

NONE, ASKED = event_pb2.LENGTH_LIMIT_UNSPECIFIED, event_pb2.LENGTH_LIMIT_MAX_NEW_TOKENS
CONTEXT, CACHE = event_pb2.LENGTH_LIMIT_CONTEXT, event_pb2.LENGTH_LIMIT_CACHE


@pytest.mark.parametrize(
    ("asked", "context", "cache", "expected"),
    [
        (1, 16, 64, (1, ASKED, NONE)),
        (13, 16, 64, (13, ASKED, NONE)),  # 3 + 13 = 16
        (14, 16, 64, (13, CONTEXT, CONTEXT)),
        (2**32 - 1, 16, 64, (13, CONTEXT, CONTEXT)),
        (8, 16, 10, (8, ASKED, NONE)),  # 3 + 8 - 1 = 10 slots
        (9, 16, 10, (8, CACHE, CACHE)),
        (9, 4, 3, (1, CONTEXT, CONTEXT)),  # both limits alike
        (None, 16, 64, (13, CONTEXT, NONE)),  # the rest of the context
        (None, 16, 10, (8, CACHE, CACHE)),
    ],
)
async def test_max_new_tokens_is_lowered_to_what_fits_and_says_why(asked, context, cache, expected) -> None:
    model = msgspec.structs.replace(MODEL, context_len=context, cache_len=cache)
    fields = {} if asked is None else {"max_new_tokens": asked}
    got = await valid(model=model, **fields)
    assert (got.max_new_tokens, got.limit, got.lowered_by) == expected


async def test_the_models_own_max_new_tokens_counts_as_asked() -> None:
    got = await valid(defaults=RequestDefaults(max_new_tokens=5))
    assert (got.max_new_tokens, got.limit, got.lowered_by) == (5, ASKED, NONE)
    got = await valid(defaults=RequestDefaults(max_new_tokens=500))
    assert (got.max_new_tokens, got.limit, got.lowered_by) == (13, CONTEXT, CONTEXT)
    assert (await valid(defaults=RequestDefaults(max_new_tokens=5), max_new_tokens=7)).max_new_tokens == 7


async def test_no_new_tokens_at_all_is_refused() -> None:
    assert at(await refusal(max_new_tokens=0)) == [("INVALID_VALUE", "request.max_new_tokens")]


# --- sampling ---


def shape(got: ValidRequest) -> tuple[float, int, float, float]:
    s = got.sampling
    return tuple(round(value, 6) for value in (s.temperature, s.top_k, s.top_p, s.min_p))


OFF = (0.0, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("defaults", "sampling", "expected"),
    [
        (GREEDY, {}, OFF),
        (GREEDY, {"temperature": 0.0, "top_k": 5, "top_p": 0.5}, OFF),
        (GREEDY, {"temperature": 1e-9}, OFF),
        (GREEDY, {"temperature": 9.9e-6}, OFF),
        (GREEDY, {"temperature": 1e-5}, (1e-5, 50, 1.0, 0.0)),
        (GREEDY, {"temperature": 100.0}, (100.0, 50, 1.0, 0.0)),
        (GREEDY, {"temperature": 0.5, "top_k": 3}, (0.5, 3, 1.0, 0.0)),
        (GREEDY, {"top_k": 3}, (1.0, 3, 1.0, 0.0)),  # naming one turns sampling on, at temperature 1
        (GREEDY, {"top_p": 0.5}, (1.0, 50, 0.5, 0.0)),
        (GREEDY, {"min_p": 0.5}, (1.0, 50, 1.0, 0.5)),
        (GREEDY, {"top_k": 0}, (1.0, 0, 1.0, 0.0)),
        (GREEDY, {"top_k": -1}, (1.0, 0, 1.0, 0.0)),
        (GREEDY, {"top_k": 1}, (1.0, 1, 1.0, 0.0)),
        (GREEDY, {"top_k": 99}, (1.0, 99, 1.0, 0.0)),
        (GREEDY, {"top_k": 100}, (1.0, 0, 1.0, 0.0)),  # as many as there are
        (GREEDY, {"top_k": 2**63 - 1}, (1.0, 0, 1.0, 0.0)),
        (GREEDY, {"top_p": 1.0, "top_k": 0}, (1.0, 0, 1.0, 0.0)),
        (GREEDY, {"min_p": 0.0, "top_k": 0}, (1.0, 0, 1.0, 0.0)),
        (SAMPLING, {}, (0.6, 20, 0.9, 0.05)),
        (SAMPLING, {"temperature": 0.0}, OFF),
        (SAMPLING, {"temperature": 2.0}, (2.0, 20, 0.9, 0.05)),
        (SAMPLING, {"top_p": 0.25}, (0.6, 20, 0.25, 0.05)),  # it sampled already, at its own temperature
        (SAMPLING, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, (0.6, 0, 1.0, 0.0)),
        (RequestDefaults(temperature=0.6, top_k=20), {}, OFF),  # do_sample is off
        (RequestDefaults(temperature=0.6, top_k=20), {"top_p": 0.5}, (1.0, 20, 0.5, 0.0)),
        (RequestDefaults(do_sample=True, top_k=1000), {}, (1.0, 0, 1.0, 0.0)),
        (RequestDefaults(do_sample=True, temperature=0.0), {}, OFF),
    ],
)
async def test_the_shape_of_the_distribution_is_resolved(defaults, sampling, expected) -> None:
    assert shape(await valid(defaults=defaults, sampling=sampling)) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, bad) for name in ("temperature", "top_p", "min_p") for bad in (math.nan, math.inf, -math.inf, -1.0)]
    + [("top_p", 0.0), ("top_p", 1.001), ("min_p", 1.0), ("temperature", -1e-9), ("top_k", -2), ("top_k", -(2**63))],
)
async def test_a_sampling_value_out_of_range_is_refused_by_path(name: str, value: float) -> None:
    assert at(await refusal(sampling={name: value})) == [("INVALID_VALUE", f"request.sampling.{name}")]


async def test_a_tiny_top_p_is_taken() -> None:
    assert (await valid(sampling={"top_p": 1e-9})).sampling.top_p == pytest.approx(1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
async def test_a_given_seed_is_kept(seed: int) -> None:
    assert (await valid(seed=seed)).sampling.seed == seed


async def test_without_a_seed_one_is_drawn_for_each_request() -> None:
    seeds = {(await valid()).sampling.seed for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- stops, logprobs, output, names ---


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({}, {7, 8}),
        ({"token_ids": [0, 99, 7]}, {7, 8, 0, 99}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "token_ids": [7, 5]}, {7, 5}),
    ],
)
async def test_stop_ids_join_those_of_model_and_request(stop: dict, expected: set[int]) -> None:
    got = (await valid(stop=stop)).stop_ids
    assert set(got) == expected
    assert len(got) == len(expected)


@pytest.mark.parametrize("bad", [-1, 100, 10**9, 2**40])
async def test_a_stop_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    error = await refusal(stop={"token_ids": [1, bad], "ignore_eos": True})
    assert at(error) == [("UNKNOWN_TOKEN_ID", "request.stop.token_ids[1]")]


@pytest.mark.parametrize(("logprobs", "default", "expected"), [
    ({}, False, False), ({}, True, True), ({"top_n": 0}, True, False), ({"top_n": 1}, False, True),
])  # fmt: skip
async def test_logprobs_are_returned_as_asked_or_by_default(logprobs: dict, default: bool, expected: bool) -> None:
    assert (await valid(logprobs=logprobs, defaults=RequestDefaults(logprobs=default))).want_logprobs is expected


RAW, PROCESSED = request_pb2.LOGPROB_SOURCE_RAW, request_pb2.LOGPROB_SOURCE_PROCESSED


@pytest.mark.parametrize(("top_n", "expected"), [(0, 0), (1, 0), (2, 2), (127, 127), (128, 128)])
async def test_up_to_128_likely_tokens_come_beside_each(top_n: int, expected: int) -> None:
    got = await valid(logprobs={"top_n": top_n})
    assert (got.want_logprobs, got.top_logprobs, got.raw_logprobs) == (top_n > 0, expected, False)


@pytest.mark.parametrize("top_n", [129, 2**32 - 1])
async def test_more_logprobs_than_that_are_refused(top_n: int) -> None:
    assert at(await refusal(logprobs={"top_n": top_n})) == [("INVALID_VALUE", "request.logprobs.top_n")]


@pytest.mark.parametrize(("source", "raw"), [(0, False), (PROCESSED, False), (RAW, True)])
async def test_logprobs_are_of_the_distribution_that_was_asked_for(source: int, raw: bool) -> None:
    assert (await valid(logprobs={"top_n": 1, "source": source})).raw_logprobs is raw
    assert (await valid(logprobs={"source": source}, defaults=RequestDefaults(logprobs=True))).raw_logprobs is raw


async def test_a_source_that_there_is_not_is_refused() -> None:
    assert at(await refusal(logprobs={"top_n": 1, "source": 3})) == [("INVALID_VALUE", "request.logprobs.source")]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({}, (True, True, True)),
        ({"text": False}, (False, True, True)),
        ({"token_ids": False}, (True, False, True)),
        ({"skip_special_tokens": False, "text": True}, (True, True, False)),
    ],
)
async def test_unset_forms_of_output_are_on(output: dict, expected: tuple[bool, bool, bool]) -> None:
    got = await valid(output=output)
    assert (got.want_text, got.want_ids, got.skip_special_tokens) == expected


@pytest.mark.parametrize("name", ["a", "ž" * 128, "with space", "🦤"])
async def test_names_of_1_to_128_printable_characters_are_kept(name: str) -> None:
    got = await valid(request_id=name, session=name)
    assert (got.request_id, got.session) == (name, name)


@pytest.mark.parametrize("name", ["a" * 129, "a\n", "\x00", "a\u200b", "\u2028"])
@pytest.mark.parametrize("field", ["request_id", "session"])
async def test_other_names_are_refused(field: str, name: str) -> None:
    assert at(await refusal(**{field: name})) == [("INVALID_VALUE", f"request.{field}")]


async def test_a_request_without_a_name_gets_one_of_its_own() -> None:
    first, second = await valid(), await valid()
    assert first.request_id != second.request_id
    assert re.fullmatch(r"[ -~]{1,128}", first.request_id)
    assert first.session is None


# --- several faults ---


async def test_all_faults_of_a_request_are_named_at_once() -> None:
    error = await refusal(
        token_ids={"ids": [1, -5, 200]},
        sampling={"temperature": -1.0, "top_p": 0.0},
        max_new_tokens=0,
        stop={"token_ids": [-1]},
        logprobs={"top_n": 129},
        request_id="\n",
        path="requests[1]",
    )
    assert sorted(field.removeprefix("requests[1].") for _, field in at(error)) == [
        "logprobs.top_n",
        "max_new_tokens",
        "request_id",
        "sampling.temperature",
        "sampling.top_p",
        "stop.token_ids[0]",
        "token_ids.ids[1]",
        "token_ids.ids[2]",
    ]
    assert error.reason is error.violations[0].reason


async def test_thousands_of_bad_ids_are_named_in_part() -> None:
    model = msgspec.structs.replace(MODEL, context_len=10**6, cache_len=10**6)
    error = await refusal(token_ids={"ids": [-1] * 50_000}, model=model)
    assert 1 <= len(error.violations) <= 100


def test_ids_to_detokenise_are_checked_by_themselves() -> None:
    check_token_ids([], path="token_ids", size=5)
    check_token_ids([0, 4], path="token_ids", size=5)
    with pytest.raises(ServiceError) as caught:
        check_token_ids([0, 5, -1], path="token_ids", size=5)
    assert caught.value.reason is Reason.UNKNOWN_TOKEN_ID
    assert at(caught.value) == [("UNKNOWN_TOKEN_ID", "token_ids[1]"), ("UNKNOWN_TOKEN_ID", "token_ids[2]")]
