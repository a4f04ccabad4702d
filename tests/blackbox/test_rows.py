"""Requests of all sorts in one batch: each gets what it would get alone, and its own text, on the real service."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterator

import pytest
import tokenizers
from chairlift_client import AdminClient, AsyncClient, ChairliftError, Client, DeadlineExceededError, Delta, Result
from support.live_server import LiveServer, live_server
from support.tiny_models import VOCAB_SIZE, generate_ids, tiny_model

PAGE = 16
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "seed": 42}
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Its tokenizer spells bytes out and marks spaces, in Llama 2's manner. Steps that any machine is some time at."""
    args = ("--dtype", "float32", "--page-size", str(PAGE), "--num-blocks", "128", "--max-prefill-chunk", str(PAGE))
    args += ("--fault-injection", "slow:3")
    with live_server(tiny_model("llama", tokenizer="metaspace"), *args) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        yield pool


def prompt(length: int, *, start: int = 0) -> list[int]:
    return [4 + (start * 37 + i * i * 11) % 370 for i in range(length)]


def ask(client: Client, ids: list[int], **options: object) -> Result:
    return client.complete(ids, **{"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "timeout": 60.0, **options})


def test_a_seeded_request_is_the_same_whatever_runs_beside_it(client: Client, pool) -> None:
    alone = ask(client, prompt(9), **SEEDED).token_ids
    assert len(set(alone)) > NUM_TOKENS // 2, "noise must differ from step to step"
    for beside in ({"temperature": 0.8}, {"temperature": 0.8, "top_k": 5}, GREEDY, {"temperature": 0.8, "seed": 43}):
        with client.generate(prompt(9, start=1), max_new_tokens=80, ignore_eos=True, **beside) as neighbour:
            for _ in range(8):
                next(neighbour)  # seven tokens before ours joins, as a later row
            ours = pool.submit(ask, client, prompt(9), **SEEDED)
            assert ours.result(60).token_ids == alone, beside
            assert sum(1 for _ in neighbour), "the neighbour was to be there all the time"
    with client.generate(prompt(9), max_new_tokens=NUM_TOKENS, ignore_eos=True, **SEEDED) as first_row:
        next(first_row)
        others = [pool.submit(ask, client, prompt(5, start=i), temperature=1.0) for i in range(3)]
        assert tuple(t for event in first_row if isinstance(event, Delta) for t in event.token_ids) == alone
    for other in others:
        other.result(60)
    twins = [pool.submit(ask, client, prompt(9), **SEEDED) for _ in range(2)]
    assert [twin.result(60).token_ids for twin in twins] == [alone, alone]


def test_a_seeded_request_is_the_same_after_a_hundred_others_and_other_seeds_differ(client: Client, pool) -> None:
    alone = ask(client, prompt(9), **SEEDED).token_ids
    others = [pool.submit(ask, client, prompt(4, start=i), max_new_tokens=2, temperature=1.0) for i in range(100)]
    assert all(len(other.result(60).token_ids) == 2 for other in others)
    assert ask(client, prompt(9), **SEEDED).token_ids == alone
    assert ask(client, prompt(9), temperature=0.8, seed=43).token_ids != alone
    unseeded = [ask(client, prompt(9), temperature=0.8) for _ in range(2)]
    assert unseeded[0].accepted.seed != unseeded[1].accepted.seed
    assert unseeded[0].token_ids != unseeded[1].token_ids
    assert ask(client, prompt(9), temperature=0.8, seed=unseeded[0].accepted.seed).token_ids == unseeded[0].token_ids


MIXED = {
    "greedy": GREEDY,
    "hot": {"temperature": 1.5, "seed": 7},
    "top_k 1": {"temperature": 1.5, "top_k": 1},
    "nucleus": {"temperature": 1.2, "top_p": 0.7, "seed": 8},
    "min_p": {"temperature": 2.0, "min_p": 0.05, "seed": 9},
    "top_k 5": {"temperature": 1.0, "top_k": 5, "seed": 10},
    "tiny temperature": {"temperature": 1e-9},
    "small temperature": {"temperature": 1e-4, "seed": 11},
    "huge temperature": {"temperature": 100.0, "seed": 12},
    "tiny top_p": {"temperature": 1.0, "top_p": 1e-9, "seed": 13},
    "top_k of all": {"temperature": 1.0, "top_k": VOCAB_SIZE, "seed": 14},
    "top_k past all": {"temperature": 1.0, "top_k": 2**31 - 1, "seed": 14},
    "top_k off": {"temperature": 1.0, "top_k": -1, "seed": 14},
}
LENGTHS = (1, 2, 3, 5, 8, 13)
ONE_TOKEN_LEFT = {"greedy", "top_k 1", "tiny temperature", "small temperature", "tiny top_p"}


def test_every_row_of_a_mixed_batch_equals_its_solo_run_while_rows_come_and_go(client: Client, pool) -> None:
    rows = [(name, prompt(6, start=i), LENGTHS[i % 6]) for i, name in enumerate([*MIXED, *MIXED, *MIXED])]

    def run(row: tuple[str, list[int], int]) -> tuple[int, ...]:
        name, ids, count = row
        answer = ask(client, ids, max_new_tokens=count, logprobs=1, **MIXED[name])
        assert all(-1e4 < entry.chosen <= 1e-6 for entry in answer.choices[0].logprobs), name
        assert len(answer.choices[0].logprobs) == len(answer.token_ids) == count
        return answer.token_ids

    solo = [run(row) for row in rows]
    assert list(pool.map(run, rows)) == solo
    assert list(pool.map(run, reversed(rows))) == solo[::-1]
    for (name, ids, count), got in zip(rows, solo, strict=True):
        if name in ONE_TOKEN_LEFT:
            assert list(got) == generate_ids(tiny_model("llama", tokenizer="metaspace"), ids, count).ids, name
    same = [{name: ask(client, prompt(6), **MIXED[name]).token_ids} for name in MIXED if name.startswith("top_k ")]
    whole = [ids for each in same for name, ids in each.items() if name not in ("top_k 1", "top_k 5")]
    assert len(whole) == 3
    assert len(set(whole)) == 1, "top_k of the whole vocabulary, or more, is off"


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)], ids=str
)
def test_whole_pages_of_a_prompt_are_found_again_and_a_token_is_left(
    client: Client, server: LiveServer, pool, length: int, cached: int, count: int
) -> None:
    with AdminClient(server.admin_target) as admin:
        admin.flush_prefix_cache()
    wanted = tuple(generate_ids(tiny_model("llama", tokenizer="metaspace"), prompt(length), count).ids)
    cold = ask(client, prompt(length), max_new_tokens=count, **GREEDY)
    assert (cold.token_ids, cold.usage.cached_tokens) == (wanted, 0)
    twins = [pool.submit(ask, client, prompt(length), max_new_tokens=count, **GREEDY) for _ in range(2)]
    for answer in (ask(client, prompt(length), max_new_tokens=count, **GREEDY), *(twin.result(60) for twin in twins)):
        assert (answer.token_ids, answer.usage.cached_tokens) == (wanted, cached)


EMOJI_BYTES = [4 + byte for byte in "🙂".encode()]  # the tokenizer's byte tokens follow its four special ones


@pytest.mark.parametrize("ids", [prompt(5), [*prompt(3), *EMOJI_BYTES[:-1]], [1]], ids=["plain", "cut emoji", "bos"])
def test_random_tokens_stream_as_the_text_that_they_decode_to_at_once(client: Client, ids) -> None:
    """Random weights give bytes that are no text, marks of spaces and special tokens, all the time."""
    events = list(client.generate(ids, max_new_tokens=256, temperature=1.5, top_k=-1, seed=1, ignore_eos=True))
    deltas = [event for event in events if isinstance(event, Delta)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert len(tokens) == 256
    library = tokenizers.Tokenizer.from_file(str(tiny_model("llama", tokenizer="metaspace") / "tokenizer.json"))
    whole, before = library.decode([*ids, *tokens]), library.decode(ids)
    text = "".join(delta.text for delta in deltas)
    assert "\ufffd" in text
    assert " " in text
    assert before + text == whole
    assert ask(client, ids, max_new_tokens=256, temperature=1.5, top_k=-1, seed=1).text == text


def test_a_space_at_the_start_of_an_answer_stays(client: Client) -> None:
    the = client.tokenize("the", add_special_tokens=False)
    assert client.detokenize(the.token_ids) == "the", "the tokenizer's own decoding strips the first space"
    library = tokenizers.Tokenizer.from_file(str(tiny_model("llama", tokenizer="metaspace") / "tokenizer.json"))
    for seed in range(300):
        answer = ask(client, [1, *the.token_ids], max_new_tokens=1, temperature=9.0, top_k=-1, seed=seed)
        spelling = library.id_to_token(answer.token_ids[0]) or ""  # the model has more ids than the tokenizer
        if spelling.startswith("\u2581"):
            assert answer.text == spelling.replace("\u2581", " ")
            return
    raise AssertionError("no answer began with a token of a space")


def expect_idle_within_a_second(client: Client) -> dict[str, int]:
    deadline = time.monotonic() + 1.0
    while (figures := client.get_server().statistics)["requests_running"] + figures["requests_waiting"]:
        assert time.monotonic() < deadline, figures
        time.sleep(0.02)
    return figures


async def test_running_requests_stop_when_their_deadline_passes(client: Client, server: LiveServer) -> None:
    async with AsyncClient(server.target) as many:
        calls = [many.complete(prompt(9, start=i), max_new_tokens=5000, timeout=0.5, **GREEDY) for i in range(20)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, DeadlineExceededError) for error in errors), errors
    expect_idle_within_a_second(client)


def test_requests_whose_deadline_passes_while_they_wait_are_never_started(client: Client, server, pool) -> None:
    def expire(number: int) -> ChairliftError:
        with pytest.raises(DeadlineExceededError) as caught:
            ask(client, prompt(9, start=number), timeout=0.001 if number % 2 else 0.3, **GREEDY)
        return caught.value

    before = client.get_server().statistics
    with AdminClient(server.admin_target) as admin:
        admin.pause()
        list(pool.map(expire, range(20)))
        admin.resume()
    after = expect_idle_within_a_second(client)
    assert (after["prompt_tokens"], after["steps"]) == (before["prompt_tokens"], before["steps"])
