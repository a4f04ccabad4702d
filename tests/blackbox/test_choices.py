"""Several choices of one request, and log-probabilities of prompts, on the real service."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from chairlift_client import AdminClient, Client, Delta, Finished, FinishReason, TokenLogprobs
from chairlift_service.sampling import choice_seed
from chairlift_worker.plan import SampleSpec
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.sampling_reference import reference_choice, reference_top
from support.solo import gap_of
from support.tiny_models import generate_ids, reference_logits, tiny_model

PAGE = 16
COUNT = 20
SEED = 2**63 + 5
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.0}
MODEL = tiny_model("llama")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A cache for a part of what comes at once, and prompts in several pieces."""
    args = ("--dtype", "float32", "--page-size", str(PAGE), "--num-blocks", "40", "--max-prefill-chunk", str(PAGE))
    with live_server(MODEL, *args, "--cpu-offload-space", "0.001", "--fault-injection", "slow:3") as running:
        yield running


def prompt(length: int, *, start: int = 0) -> list[int]:
    return [4 + (start * 37 + i * i * 11) % 370 for i in range(length)]


def expect_sampled(ids: list[int], answer: list[int], choice: int) -> None:
    """Each token is the definition's, by transformers' logits and the choice's own seed, but for ties."""
    logits = reference_logits(MODEL, [*ids, *answer])[len(ids) - 1 :]
    for index, token in enumerate(answer):
        spec = SampleSpec(**SAMPLING, seed=choice_seed(SEED, choice), index=index, logprob=False)
        wanted, _ = reference_choice(logits[index], spec)
        assert token == wanted or gap_of(logits[index], spec, ()) < 1e-3, (choice, index)


def expect_judged(ids: list[int], entries: tuple[TokenLogprobs | None, ...], num_top: int) -> None:
    """An entry for each token of the prompt, of the log-softmax of transformers' logits."""
    assert len(entries) == len(ids)
    assert entries[0] is None
    logits = reference_logits(MODEL, ids)
    logprobs = logits.log_softmax(-1)
    for place, entry in enumerate(entries[1:]):
        assert entry is not None
        token = ids[place + 1]
        assert entry.chosen == pytest.approx(float(logprobs[place, token]), abs=1e-4)
        if num_top == 1:
            assert entry.top == ((token, entry.chosen),)
            continue
        spec = SampleSpec(**SAMPLING, seed=0, index=0, logprob=True, num_top=num_top, raw=True)
        wanted = reference_top(logits[place], spec, ids[: place + 1], chosen=token)
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in wanted], abs=1e-4)


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 100])
def test_each_choice_is_the_solo_run_of_its_seed(client: Client, length: int) -> None:
    ids = prompt(length, start=length)
    answer = client.complete(
        ids, max_new_tokens=COUNT, num_choices=6, seed=SEED, ignore_eos=True, timeout=60, **SAMPLING
    )
    assert answer.accepted.num_choices == len(answer.choices) == 6
    for number, choice in enumerate(answer.choices):
        expect_sampled(ids, list(choice.token_ids), number)
        assert (choice.finished.choice, choice.finished.reason) == (number, FinishReason.LENGTH)
    assert len({choice.token_ids for choice in answer.choices}) > 1
    alone = client.complete(ids, max_new_tokens=COUNT, seed=choice_seed(SEED, 4), ignore_eos=True, **SAMPLING)
    assert alone.token_ids == answer.choices[4].token_ids


def test_greedy_choices_are_all_the_same(client: Client) -> None:
    wanted = generate_ids(MODEL, prompt(40), COUNT).ids
    answer = client.complete(prompt(40), max_new_tokens=COUNT, num_choices=3, temperature=0, ignore_eos=True)
    assert [list(choice.token_ids) for choice in answer.choices] == [wanted] * 3


def test_more_choices_than_the_cache_holds_at_once(client: Client) -> None:
    ids = prompt(60)
    answer = client.complete(
        ids, max_new_tokens=60, num_choices=20, seed=SEED, ignore_eos=True, timeout=120, **SAMPLING
    )
    for number in (0, 7, 19):
        expect_sampled(ids, list(answer.choices[number].token_ids), number)
    assert sum(choice.finished.timings.preemptions for choice in answer.choices) > 0


def test_a_worker_that_dies_costs_no_choice_a_token(client: Client, server: LiveServer) -> None:
    ids = prompt(50, start=3)
    outputs: dict[int, list[int]] = {number: [] for number in range(6)}
    entries: list[TokenLogprobs | None] = []
    finished = []
    (pid,) = client.get_server().worker_pids
    options = {"num_choices": 6, "seed": SEED, "ignore_eos": True, "prompt_logprobs": 3, **SAMPLING}
    for event in client.generate(ids, max_new_tokens=40, timeout=120, **options):
        if isinstance(event, Delta):
            entries += event.prompt_logprobs
            assert event.index == len(outputs[event.choice])
            outputs[event.choice] += event.token_ids
            if pid and sum(map(len, outputs.values())) > 30:
                os.kill(pid, signal.SIGKILL)
                pid = 0
        elif isinstance(event, Finished):
            finished.append(event.choice)
    assert not pid
    assert sorted(finished) == list(range(6))
    for number, output in outputs.items():
        assert len(output) == 40
        expect_sampled(ids, output, number)
    expect_judged(ids, tuple(entries), 3)


@pytest.mark.parametrize("num_top", [1, 5])
@pytest.mark.parametrize("length", [1, 2, PAGE, 3 * PAGE + 1])
def test_prompts_are_judged_whatever_the_cache_has_of_them(client: Client, length: int, num_top: int) -> None:
    ids = prompt(length, start=9)
    for count in (0, 0, 3, 0):
        answer = client.complete(ids, max_new_tokens=count, prompt_logprobs=num_top, temperature=0, ignore_eos=True)
        assert len(answer.token_ids) == count
        expect_judged(ids, answer.choices[0].prompt_logprobs, num_top)


def test_eight_choices_of_a_long_prompt_cost_one_prefill_and_fewer_than_eight_pages_more() -> None:
    """By the service's counters, when all of them have begun."""
    args = ("--dtype", "float32", "--page-size", str(PAGE), "--num-blocks", "400")
    args += ("--model-config", "max_position_embeddings=2048")
    used = {}
    with live_server(MODEL, *args, "--fault-injection", "slow:50") as server, Client(server.target) as client:
        for number, num_choices in enumerate((1, 8)):
            ids, before = prompt(1000, start=number), client.get_server().statistics
            begun, steps = set(), 0
            events = client.generate(ids, max_new_tokens=12, num_choices=num_choices, seed=1, ignore_eos=True)
            with events, AdminClient(server.admin_target) as admin:
                for event in events:
                    if isinstance(event, Delta):
                        begun.add(event.choice)
                        steps = max(steps, event.index + event.num_tokens)
                    if len(begun) == num_choices:
                        break
                admin.pause()
                now = client.get_server().statistics
                used[num_choices] = now["blocks_total"] - now["blocks_free"]
                computed = now["computed_tokens"] - before["computed_tokens"]
                assert 1000 <= computed <= 1000 + num_choices * (steps + 3)
                admin.resume()
            assert_idle(server)
            with AdminClient(server.admin_target) as admin:
                admin.flush_prefix_cache()
    assert used[8] - used[1] < 8
