"""What prompt lookup guesses, against transformers' generator of candidates and against a search through the text."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from chairlift_worker.speculation.lookup import MAX_CANDIDATES, MAX_PLACES, PromptLookup
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

MIN_LEN, MAX_LEN, NUM_DRAFTS = 2, 4, 5


def guess(text: list[int], *, min_len: int = MIN_LEN, max_len: int = MAX_LEN, limit: int = 10**6) -> list[int]:
    tokens = array("i", text)
    lookup = PromptLookup(min_len=min_len, max_len=max_len, num_tokens=len(text) + 10)
    lookup.catch_up(tokens, limit)
    return list(lookup.propose(tokens, NUM_DRAFTS))


def match_len(text: list[int], end: int) -> int:
    """How many tokens before place `end` are the last ones of the text."""
    return next((n for n in range(MAX_LEN) if n >= end or text[end - 1 - n] != text[-1 - n]), MAX_LEN)


def searched(text: list[int]) -> list[int]:
    """By definition: what follows the longest match, the newest of several; none but the newest ones count."""
    ends = [end for end in range(len(text) - 1, 0, -1) if match_len(text, end) >= MIN_LEN][:MAX_CANDIDATES]
    if not ends:
        return []
    begin = max(ends, key=lambda end: match_len(text, end))
    return [(text[begin:] * NUM_DRAFTS)[i] for i in range(NUM_DRAFTS)]


def random_text(seed: int, *, vocab_size: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(length)]


def test_where_one_match_is_the_longest_the_guess_is_that_of_transformers() -> None:
    num_compared = 0
    for seed in range(300):
        text = random_text(seed, vocab_size=12, length=80)
        lens = [match_len(text, end) for end in range(1, len(text))]
        best = max(lens)
        if best < MIN_LEN or lens.count(best) > 1 or lens.index(best) + 1 + NUM_DRAFTS > len(text):
            continue
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=NUM_DRAFTS, max_matching_ngram_size=MAX_LEN, max_length=1000
        )
        candidates, _ = generator.get_candidates(torch.tensor([text]))
        assert guess(text) == candidates[0, len(text) :].tolist()
        num_compared += 1
    assert num_compared > 50


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 20])
def test_a_text_that_grows_is_searched_as_by_definition_at_every_length(vocab_size: int) -> None:
    text = random_text(vocab_size, vocab_size=vocab_size, length=120)
    lookup, tokens = PromptLookup(min_len=MIN_LEN, max_len=MAX_LEN, num_tokens=10_000), array("i")
    num_found = 0
    for length, token in enumerate(text, start=1):
        tokens.append(token)
        lookup.catch_up(tokens, 3)
        expected = searched(text[:length])
        assert list(lookup.propose(tokens, NUM_DRAFTS)) == expected
        num_found += bool(expected)
    assert num_found > 10


def test_of_equal_matches_the_newest_counts_and_a_longer_one_before_it() -> None:
    assert guess([1, 2, 50, 51, 52, 53, 54, 1, 2, 60, 61, 62, 63, 64, 1, 2]) == [60, 61, 62, 63, 64]
    assert guess([9, 1, 2, 50, 51, 52, 53, 54, 1, 2, 60, 61, 62, 63, 64, 9, 1, 2]) == [50, 51, 52, 53, 54]


def test_what_repeats_itself_is_guessed_to_go_on() -> None:
    assert guess([7, 1, 2, 3, 1, 2]) == [3, 1, 2, 3, 1]
    assert guess([5, 5, 5]) == [5] * NUM_DRAFTS


def test_a_match_shorter_than_the_least_is_none() -> None:
    assert guess([1, 2, 3, 9, 3]) == []
    assert guess([1, 2, 3, 9, 3], min_len=1) == [9, 3, 9, 3, 9]
    assert guess([3]) == guess([3, 3]) == []


def test_an_index_that_lags_behind_knows_the_beginning_only() -> None:
    text = [1, 2, 30, 31, 32, 33, 34, 4, 5, 40, 41, 42, 43, 44, 4, 5]
    assert guess(text, limit=4) == []
    assert guess([*text[:-2], 1, 2], limit=4) == [30, 31, 32, 33, 34]
    assert guess(text) == [40, 41, 42, 43, 44]


def test_what_is_too_long_ago_is_forgotten_and_the_memory_stays_as_it_is() -> None:
    lookup = PromptLookup(min_len=MIN_LEN, max_len=MAX_LEN, num_tokens=10**9)
    text = array("i", [1, 2, *range(10, 10 + MAX_PLACES - 2), 1, 2])
    lookup.catch_up(text, 10**6)
    assert lookup.propose(text, 2) == (10, 11)
    text = array("i", [1, 2, *range(10, 10 + MAX_PLACES), 1, 2])
    lookup = PromptLookup(min_len=MIN_LEN, max_len=MAX_LEN, num_tokens=10**9)
    lookup.catch_up(text, 10**6)
    assert lookup.propose(text, 2) == ()
    assert len(lookup._links) == len(lookup._heads) == MAX_PLACES
