"""Penalties, biases, bans and log-probabilities on the real service are transformers' own, whatever runs beside."""

from __future__ import annotations

import concurrent.futures
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chairlift_client import AdminClient, Client, InvalidRequestError, Result
from chairlift_worker.ipc.messages import ProcessorsMsg
from chairlift_worker.plan import SampleSpec
from support.exactness import Comparisons
from support.live_server import LiveServer, live_server
from support.processors import make_processors
from support.sampling_reference import reference_choice, reference_top
from support.solo import gap_of
from support.tiny_models import EOS_ID, VOCAB_SIZE, generate_ids, reference_logits, tiny_model

PAGE = 16
NUM_TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "logprob": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A cache for a part of what comes at once, and prompts in several pieces."""
    args = ("--dtype", "float32", "--page-size", str(PAGE), "--num-blocks", "24", "--max-prefill-chunk", str(PAGE))
    args += ("--cpu-offload-space", "0.001", "--speculative", "ngram", "--fault-injection", "slow:3")
    with live_server(folder(), *args) as running:
        yield running


@pytest.fixture(scope="module")
def comparisons() -> Iterator[Comparisons]:
    counted = Comparisons()
    yield counted
    counted.check_ties()


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        yield pool


def prompt(length: int, *, start: int = 0) -> list[int]:
    return [4 + (start * 37 + i * i * 11) % 370 for i in range(length)]


def ask(client: Client, ids: list[int], **options: Any) -> Result:
    return client.complete(ids, **{"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "timeout": 60.0, **options})


@functools.cache
def folder() -> Path:
    return tiny_model("llama")


@functools.cache
def plain() -> list[int]:
    """The greedy answer to `prompt(20)`."""
    return generate_ids(folder(), prompt(20), NUM_TOKENS).ids


BESIDE_TRANSFORMERS = (
    *("repetition", "repetition wanted", "n-grams of 1", "n-grams of 2", "bias", "sequences", "banned", "all"),
)


def asked_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One of these, as it is asked of us, and of transformers."""
    if name in ("repetition", "repetition wanted"):
        penalty = {"repetition_penalty": 1.3 if name == "repetition" else 0.6}
        return penalty, penalty
    if name.startswith("n-grams"):
        size = {"no_repeat_ngram_size": int(name[-1])}
        return size, size
    bans, sequences = plain()[::3], [plain()[:1], plain()[2:4], plain()[5:8]]
    biases = {7: 100.0, plain()[0]: -3.5}
    bias = {"logit_bias": biases}, {"sequence_bias": {(token,): value for token, value in biases.items()}}
    both = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    ours = {**both, "banned_token_ids": bans, "logit_bias": {9: 4.0}}
    theirs = {**both, "suppress_tokens": bans, "sequence_bias": {(9,): 4.0}}
    return {
        "bias": bias,
        "sequences": ({"banned_sequences": sequences}, {"bad_words_ids": sequences}),
        "banned": ({"banned_token_ids": bans}, {"suppress_tokens": bans}),
        "all": (ours, theirs),
    }[name]


@pytest.mark.parametrize("name", BESIDE_TRANSFORMERS)
def test_greedy_answers_are_those_of_generate(client: Client, comparisons: Comparisons, name: str) -> None:
    ours, theirs = asked_of(name)
    for ids in (prompt(20), prompt(3, start=5), prompt(5) * 7):
        reference = generate_ids(folder(), ids, NUM_TOKENS, **theirs)
        got = ask(client, ids, temperature=0.0, **ours)
        comparisons.expect(got.token_ids, reference.ids, reference.gaps, what=name)


@pytest.mark.parametrize("least", [0, 1, 5, NUM_TOKENS - 1, NUM_TOKENS])
def test_nothing_stops_an_answer_before_min_new_tokens(client: Client, least: int) -> None:
    asked = {"temperature": 0.0, "ignore_eos": False, "logit_bias": {EOS_ID: 100.0}}
    got = ask(client, prompt(20), min_new_tokens=least, **asked)
    reference = generate_ids(
        folder(), prompt(20), NUM_TOKENS, ignore_eos=False, sequence_bias={(EOS_ID,): 100.0}, min_new_tokens=least
    )
    assert list(got.token_ids) == reference.ids
    assert got.accepted.min_new_tokens == least
    stops = plain()[:2]  # of the caller's, EOS ignored
    got = ask(client, prompt(20), temperature=0.0, stop_token_ids=stops, min_new_tokens=least)
    assert not set(stops) & set(got.token_ids[:least])
    assert len(got.token_ids) >= least


def test_banned_words_do_not_come(client: Client) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder() / "tokenizer.json"))
    words = [word for word in library.decode(plain()).split(" ") if word and "\ufffd" not in word][:8]
    got = ask(client, prompt(20), temperature=0.0, banned_words=words)
    assert list(got.token_ids) != plain()
    banned = [library.encode(form, add_special_tokens=False).ids for word in words for form in (word, f" {word}")]
    ids = list(got.token_ids)
    for sequence in banned:
        assert not any(ids[i : i + len(sequence)] == sequence for i in range(len(ids))), sequence
    assert list(got.accepted.sampling.banned_words) == words


# --- case 7: parameters of one row applied to another, or dropped ---

OTHER_ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.5, "seed": 7},
    "top_k 1": {"temperature": 1.5, "top_k": 1},
    "presence": {"temperature": 1.0, "seed": 3, "presence_penalty": 2.0},
    "frequency": {"temperature": 0.0, "frequency_penalty": -2.0},
    "allowed": {"temperature": 1.0, "seed": 4, "allowed_token_ids": [7, 8, 9, 300]},
    "top": {"temperature": 0.7, "seed": 5, "logprobs": 9, "repetition_penalty": 1.1},
    "raw": {"temperature": 0.7, "seed": 5, "logprobs": 9, "logprob_source": "raw"},
}
LENGTHS = (1, 2, 3, 5, 8, 13)


def test_every_row_equals_its_solo_run_while_rows_come_and_go(client: Client, pool, comparisons: Comparisons) -> None:
    options = {name: {"temperature": 0.0, **asked_of(name)[0]} for name in BESIDE_TRANSFORMERS} | OTHER_ROWS
    rows = [(name, prompt(6 + i, start=i), LENGTHS[i % 6]) for i, name in enumerate([*options, *options])]

    def run(row: tuple[str, list[int], int]) -> tuple[Any, ...]:
        name, ids, count = row
        answer = ask(client, ids, max_new_tokens=count, **options[name])
        assert len(answer.token_ids) == count
        likeliest = [[token for token, _ in entry.top] for entry in answer.choices[0].logprobs]
        return answer.token_ids, likeliest

    solo = [run(row) for row in rows]
    assert list(pool.map(run, rows)) == solo
    assert list(pool.map(run, reversed(rows))) == solo[::-1]
    for (name, ids, count), (got, _) in zip(rows, solo, strict=True):
        if name in BESIDE_TRANSFORMERS:  # the first token included
            reference = generate_ids(folder(), ids, count, **asked_of(name)[1])
            comparisons.expect(got, reference.ids, reference.gaps, what=name)
        if name == "allowed":
            assert set(got) <= {7, 8, 9, 300}


# --- case 12: ids outside the vocabulary ---


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"sampling.logit_bias[{VOCAB_SIZE}]"),
        ({"logit_bias": {-1: 100.0}}, "sampling.logit_bias[-1]"),
        ({"stop_token_ids": [10**9], "min_new_tokens": 4}, "stop.token_ids[0]"),
        ({"banned_token_ids": [-1]}, "sampling.banned_token_ids[0]"),
        ({"allowed_token_ids": [0, VOCAB_SIZE]}, "sampling.allowed_token_ids[1]"),
        ({"banned_sequences": [[5, 2**31]]}, "sampling.banned_sequences[0].ids[1]"),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_and_harms_nobody(client: Client, pool, options, field: str) -> None:
    neighbour = pool.submit(ask, client, prompt(20), temperature=0.0)
    with pytest.raises(InvalidRequestError) as refused:
        ask(client, prompt(20), **options)
    assert [violation.field for violation in refused.value.field_violations] == [f"request.{field}"]
    assert list(neighbour.result(60).token_ids) == plain()


# --- case 24: a prompt that is in the cache loses no history ---


@pytest.mark.parametrize(
    "asked",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 1.0}, {"frequency_penalty": 2.0}, {"no_repeat_ngram_size": 2}],
)
@pytest.mark.parametrize("ids", [prompt(3 * PAGE), prompt(3) * PAGE], ids=["long", "said over and over"])
def test_a_second_run_that_finds_its_prompt_says_the_same(
    client: Client, server: LiveServer, pool, comparisons: Comparisons, asked: dict[str, Any], ids: list[int]
) -> None:
    with AdminClient(server.admin_target) as admin:
        admin.flush_prefix_cache()
    first = ask(client, ids, temperature=0.0, **asked)
    assert first.usage.cached_tokens == 0
    others = [pool.submit(ask, client, prompt(length, start=length), temperature=0.0) for length in (1, 15, 40)]
    again = ask(client, ids, temperature=0.0, **asked)
    assert again.usage.cached_tokens == 2 * PAGE
    assert again.token_ids == first.token_ids
    assert all(len(other.result(60).token_ids) == NUM_TOKENS for other in others)
    check_chosen(ids, first, make_processors(**asked), comparisons)


def check_chosen(ids: list[int], answer: Result, processors: ProcessorsMsg, comparisons: Comparisons) -> None:
    """Holds each token to its definition, by the logits of transformers' model over the whole text."""
    logits = reference_logits(folder(), [*ids, *answer.token_ids])[len(ids) - 1 :]
    wanted, gaps = [], []
    for index in range(len(answer.token_ids)):
        spec = SampleSpec(**GREEDY, index=index, processors=processors)
        known = [*ids, *answer.token_ids[:index]]
        wanted.append(reference_choice(logits[index], spec, known)[0])
        gaps.append(gap_of(logits[index], spec, known))
    comparisons.expect(answer.token_ids, wanted, gaps, what="by definition")


# --- case 25: extreme values, beside banned ids ---


def test_extreme_values_in_one_batch_choose_nothing_that_is_banned(client: Client, pool) -> None:
    banned = plain()[::2]
    extremes = [
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for temperature in (0.0, 1e-9, 1e-5, 1e-4, 1e-3, 100.0)
        for top_k, top_p, min_p in [(-1, 1.0, 0.0), (0, 1e-9, 0.0), (1, 1.0, 0.0), (VOCAB_SIZE, 1.0, 0.99)]
    ]
    extremes += [{"temperature": 1.0, "repetition_penalty": penalty} for penalty in (1e-30, 1e30)]
    greedy = generate_ids(folder(), prompt(20), 6, suppress_tokens=banned)

    def run(extreme: dict[str, float]) -> Result:
        return ask(client, prompt(20), max_new_tokens=6, banned_token_ids=banned, logprobs=128, seed=1, **extreme)

    for extreme, answer in zip(extremes, pool.map(run, extremes), strict=True):
        assert not set(banned) & set(answer.token_ids), extreme
        for entry in answer.choices[0].logprobs:
            assert all(math.isfinite(value) and value <= 1e-6 for value in (entry.chosen, *(lp for _, lp in entry.top)))
            assert not set(banned) & {token for token, _ in entry.top}, extreme
        one_left = extreme["temperature"] <= 1e-3 or extreme.get("top_k") == 1 or extreme.get("min_p") == 0.99
        if one_left and min(greedy.gaps) > 0.1 and "repetition_penalty" not in extreme:
            assert list(answer.token_ids) == greedy.ids, extreme


# --- log-probabilities ---


@pytest.mark.parametrize("source", ["processed", "raw"])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}, {"temperature": 0.7, "top_k": 0}],
)
def test_likeliest_tokens_are_those_of_transformers_logits(client: Client, source: str, sampling: dict) -> None:
    ids, asked = prompt(20, start=2), {"repetition_penalty": 1.3, "banned_token_ids": plain()[:3]}
    answer = ask(client, ids, logprobs=10, logprob_source=source, seed=5, **sampling, **asked)
    entries = answer.choices[0].logprobs
    assert len(entries) == len(answer.token_ids) == NUM_TOKENS
    logits = reference_logits(folder(), [*ids, *answer.token_ids])[len(ids) - 1 :]
    processors = make_processors(repetition_penalty=1.3, banned_ids=plain()[:3])
    for index, (token, entry) in enumerate(zip(answer.token_ids, entries, strict=True)):
        spec = SampleSpec(**GREEDY | sampling, num_top=10, index=index, raw=source == "raw", processors=processors)
        wanted = reference_top(logits[index], spec, [*ids, *answer.token_ids[:index]], chosen=token)
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in wanted], abs=2e-3)
        assert (token, entry.chosen) in entry.top
        for (got, _), (expected, value) in zip(entry.top, wanted, strict=True):
            near = [each for each, other in wanted if abs(other - value) < 2e-3]
            assert got == expected or got in near
