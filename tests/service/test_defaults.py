"""Defaults from generation_config.json, against transformers' own GenerationConfig."""

from __future__ import annotations

import re

import pytest
from chairlift_service import defaults as module
from chairlift_service.defaults import RequestDefaults, ignored_entries, request_defaults


def test_without_a_file_transformers_defaults_hold() -> None:
    from transformers import GenerationConfig

    reference = GenerationConfig._get_default_generation_params()
    got = request_defaults({})
    assert (got.do_sample, got.temperature, got.top_k, got.top_p) == tuple(
        reference[name] for name in ("do_sample", "temperature", "top_k", "top_p")
    )
    assert reference.get("min_p") is None
    assert got.min_p == 0
    assert got.max_new_tokens is None


def test_the_values_that_change_nothing_are_transformers_defaults() -> None:
    from transformers import GenerationConfig

    reference = GenerationConfig._get_default_generation_params()
    differing = {
        name: (value, reference[name])
        for name, value in module._NEUTRAL.items()
        if name in reference and reference[name] != value
    }
    assert differing == {}


FILE = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "max_new_tokens": 64}


def test_the_files_values_are_taken() -> None:
    assert request_defaults(FILE) == RequestDefaults(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, max_new_tokens=64
    )


def test_null_is_unset() -> None:
    assert request_defaults(dict.fromkeys(FILE)) == RequestDefaults()


def test_the_file_can_be_left_out() -> None:
    assert request_defaults({**FILE, "top_p": 7}, model_defaults=False, logprobs=True) == RequestDefaults(logprobs=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("do_sample", 1), ("temperature", -0.1), ("temperature", "hot"), ("temperature", float("nan"))),
        *(("top_k", -2), ("top_p", 0), ("top_p", 1.1), ("min_p", 1), ("min_p", True), ("max_new_tokens", 0)),
        *(("repetition_penalty", 0), ("repetition_penalty", "much"), ("no_repeat_ngram_size", -1)),
        *(("bad_words_ids", [1]), ("bad_words_ids", [[]]), ("bad_words_ids", [[-1]]), ("bad_words_ids", [[2**31]])),
        *(("suppress_tokens", 4), ("suppress_tokens", [True]), ("min_new_tokens", -1), ("min_length", -1)),
    ],
)
def test_a_value_that_no_request_could_have_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=f"generation_config.json: {name} .* is {re.escape(repr(value))}.*--no-model-defaults"
    ):
        request_defaults({name: value})


def test_entries_that_would_change_the_output_are_listed() -> None:
    config = {**FILE, "typical_p": 0.9, "max_length": 4096, "begin_suppress_tokens": [1], "eos_token_id": 2}
    assert ignored_entries(config) == ("begin_suppress_tokens = [1]", "max_length = 4096", "typical_p = 0.9")


PROCESSORS = {
    "repetition_penalty": 1.05,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5, 6], [9], [7]],
    "suppress_tokens": [4, -1, 100, 99],
    "min_new_tokens": 2,
    "min_length": 30,
}


def test_what_the_file_says_of_processors_is_taken() -> None:
    got = request_defaults({**FILE, **PROCESSORS}, vocab_size=100, eos_token_ids=[9])
    assert (got.repetition_penalty, got.no_repeat_ngram_size) == (1.05, 3)
    assert got.banned_sequences == ((5, 6), (7,)), "EOS is no bad word, as in transformers"
    assert got.banned_token_ids == (4, 99), "what there is not cannot be chosen anyway"
    assert ignored_entries(PROCESSORS) == ()


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, (0, 0)),
        ({"min_new_tokens": 2}, (2, 2)),
        ({"min_length": 30}, (25, 0)),
        ({"min_length": 30, "min_new_tokens": 2}, (2, 2)),  # transformers: "Both ... seem to have been set"
        ({"min_length": 30, "min_new_tokens": 0}, (0, 0)),
    ],
)
def test_the_least_length_is_counted_as_transformers_counts_it(entries: dict, expected: tuple[int, int]) -> None:
    got = request_defaults(entries)
    assert (got.least_new_tokens(5), got.least_new_tokens(40)) == expected


def test_entries_at_their_neutral_values_are_not_listed() -> None:
    neutral = {"repetition_penalty": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "bad_words_ids": None}
    assert ignored_entries({**FILE, **neutral, "transformers_version": "5.24.0", "use_cache": True}) == ()
