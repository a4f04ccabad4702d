"""Drafts looked up in a request's own text, on the real service with the real model: faster, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chairlift_client import Client, Delta, Finished
from chairlift_worker.plan import SampleSpec
from support.exactness import TIE_GAP
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.sampling_reference import reference_choice
from support.smollm2 import smollm2_folder
from support.tiny_models import generate_ids, reference_logits
from tokenizers import Tokenizer

NUM_TOKENS = 48
TEXT = (
    "The council decided in spring to repair the lighthouse at the end of the harbour. The firm that came from the "
    "coast found that its foundations had moved by four inches."
)
QUOTE = f"Copy: {TEXT}\nCopy: {TEXT}\nCopy: {TEXT}\nCopy: The council"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(smollm2_folder(), "--dtype", "float32", "--speculative", "ngram") as running:
        yield running


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json")).encode(QUOTE).ids


@pytest.fixture(scope="module")
def wanted(prompt: list[int]) -> list[int]:
    reference = generate_ids(smollm2_folder(), prompt, NUM_TOKENS)
    assert min(reference.gaps) > TIE_GAP, "no tie excuses anything"
    return reference.ids


def stream(server: LiveServer, prompt: list[int], **options: object) -> tuple[list[Delta], Finished]:
    deltas: list[Delta] = []
    with Client(server.target) as client, client.generate(prompt, **options) as events:
        for event in events:
            if isinstance(event, Delta):
                deltas.append(event)
            elif isinstance(event, Finished):
                return deltas, event
    raise AssertionError("no ending")


def test_a_quotation_comes_several_tokens_at_a_time_and_is_transformers_own(
    server: LiveServer, prompt: list[int], wanted: list[int]
) -> None:
    before = assert_idle(server).statistics
    deltas, finished = stream(server, prompt, max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    ids = [token for delta in deltas for token in delta.token_ids]
    assert ids == wanted
    assert finished.usage.generated_tokens == NUM_TOKENS
    assert [delta.index for delta in deltas] == [sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))]
    after = assert_idle(server).statistics
    steps, drafted, accepted = (
        after[name] - before[name] for name in ("steps", "draft_tokens", "accepted_draft_tokens")
    )
    assert steps < NUM_TOKENS / 2
    assert steps + accepted == NUM_TOKENS, "each step brings one token, and what held of its drafts"
    assert accepted <= drafted


def test_an_output_ends_at_its_limit_and_at_a_stop_id_in_the_middle_of_drafts(
    server: LiveServer, prompt: list[int], wanted: list[int]
) -> None:
    for num_tokens in (1, 2, 19, 20):
        deltas, finished = stream(server, prompt, max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        assert [token for delta in deltas for token in delta.token_ids] == wanted[:num_tokens]
        assert finished.usage.generated_tokens == num_tokens
    for stop in sorted({wanted[21], wanted[30]}):
        expected = wanted[: wanted.index(stop) + 1]
        deltas, finished = stream(server, prompt, max_new_tokens=60, temperature=0.0, stop_token_ids=[stop])
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert finished.usage.generated_tokens == len(expected)
    assert_idle(server)


def test_sampled_tokens_that_came_together_are_those_of_their_seed(server: LiveServer, prompt: list[int]) -> None:
    """By the definition: transformers' logits at each place, and the noise of the place's index."""
    sampling = {"temperature": 0.6, "top_k": 20, "seed": 3}
    deltas, _ = stream(server, prompt, max_new_tokens=24, ignore_eos=True, logprobs=1, **sampling)
    ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = [entry.chosen for delta in deltas for entry in delta.logprobs]
    assert len(deltas) < len(ids) == len(logprobs) == 24
    logits = reference_logits(smollm2_folder(), [*prompt, *ids])[len(prompt) - 1 :]
    for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        spec = SampleSpec(index=index, logprob=True, top_p=1.0, min_p=0.0, **sampling)
        wanted, wanted_logprob = reference_choice(logits[index], spec)
        assert token == wanted
        assert logprob == pytest.approx(wanted_logprob, abs=1e-3)
