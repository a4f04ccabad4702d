"""In float32 the service gives the ids that transformers' generate gives for each request alone.

However the requests come (alone, all at once, in random order, twice), however their prompts are cut into chunks, and
however often they lose their cache pages.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from chairlift_client import AdminClient, Client, Delta, Finished
from support.exactness import Comparisons
from support.live_server import LiveServer, live_server
from support.smollm2 import smollm2_folder
from support.tiny_models import Reference, generate_ids, tiny_model

PAGE = 16
MAX_BATCH_TOKENS = 64
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, MAX_BATCH_TOKENS + 36)
NUM_TOKENS = 10
NUM_TOKENS_EVICTED = 24
KINDS = ("llama", "qwen3", "gpt2", "untied", "smollm2")
TEXT_IDS = [(7 * i * i + 31 * i) % 373 + 4 for i in range(300)]  # inside every vocabulary here, past the special tokens


@dataclass(frozen=True)
class Case:
    """A prompt and the answers that transformers gives."""

    prompt: list[int]
    reference: Reference


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    finished: Finished


@pytest.fixture(scope="module")
def comparisons() -> Iterator[Comparisons]:
    counted = Comparisons()
    yield counted
    print(f"{counted.num_sequences} sequences compared, {counted.num_ties} excused by a tie")
    counted.check_ties()


def folder_of(kind: str) -> Path:
    return smollm2_folder() if kind == "smollm2" else tiny_model(kind)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(kind: str) -> list[Case]:
    prompts = [TEXT_IDS[length : 2 * length] for length in LENGTHS]
    folder = folder_of(kind)
    return [Case(prompt, generate_ids(folder, prompt, NUM_TOKENS_EVICTED)) for prompt in prompts]


def serve(kind: str, *args: str):
    common = (
        "--dtype",
        "float32",
        "--page-size",
        str(PAGE),
        "--max-batch-tokens",
        str(MAX_BATCH_TOKENS),
        "--no-model-defaults",
    )
    return live_server(folder_of(kind), *common, *args)


def expect(comparisons: Comparisons, cases: list[Case], answers: list[Answer], what: str) -> None:
    for case, answer in zip(cases, answers, strict=True):
        num = len(answer.ids)
        reference = case.reference
        label = f"{what}, prompt of {len(case.prompt)}"
        comparisons.expect(answer.ids, reference.ids[:num], reference.gaps[:num], what=label)
        assert answer.finished.usage.prompt_tokens == len(case.prompt), label
        assert answer.finished.usage.generated_tokens == num, label


def run(
    server: LiveServer, cases: list[Case], *, pauses: list[float] | None = None, order: list[int] | None = None
) -> list[Answer]:
    """All cases at once, or with these pauses before each, in this order of arrival."""
    with Client(server.target) as client:
        ids: dict[int, str] = {}
        for place, index in enumerate(order or range(len(cases))):
            time.sleep(pauses[place] if pauses else 0.0)
            added = client.add_request(cases[index].prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
            ids[index] = added.request_id
        answers = [read(client, ids[index]) for index in range(len(cases))]
        client.cancel(*ids.values())  # lets the kept results go
        return answers


def read(client: Client, request_id: str) -> Answer:
    tokens: list[int] = []
    with client.result(request_id, timeout=120) as events:
        for event in events:
            match event.event:
                case Delta() as delta:
                    assert delta.index == len(tokens)
                    tokens.extend(delta.token_ids)
                case Finished() as finished:
                    return Answer(tokens, finished)
                case _:
                    pass
    raise AssertionError("a stream without an ending")


def flush(server: LiveServer) -> None:
    with AdminClient(server.admin_target) as admin:
        admin.flush_prefix_cache()


def test_alone_all_at_once_in_random_order_and_again(kind: str, cases: list[Case], comparisons: Comparisons) -> None:
    rng = random.Random(5)
    with serve(kind, "--num-blocks", "64") as server:
        for case in cases:
            expect(comparisons, [case], run(server, [case]), f"{kind} alone")
            flush(server)
        expect(comparisons, cases, run(server, cases), f"{kind} all at once")
        again = run(server, cases)
        expect(comparisons, cases, again, f"{kind} again")
        cached = [answer.finished.usage.cached_tokens for answer in again]
        assert cached == [(len(case.prompt) - 1) // PAGE * PAGE for case in cases]
        for round_number in range(2):
            flush(server)
            order = rng.sample(range(len(cases)), len(cases))
            pauses = [rng.random() * 0.05 for _ in cases]
            answers = run(server, cases, order=order, pauses=pauses)
            expect(comparisons, cases, answers, f"{kind} in random order {round_number}")


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_whatever_the_chunks(kind: str, cases: list[Case], comparisons: Comparisons, chunk: int) -> None:
    with serve(kind, "--num-blocks", "64", "--max-prefill-chunk", str(chunk)) as server:
        expect(comparisons, cases, run(server, cases), f"{kind} in chunks of {chunk}")
        expect(comparisons, cases, run(server, cases), f"{kind} again in chunks of {chunk}")


def test_evicted_at_least_once(kind: str, cases: list[Case], comparisons: Comparisons) -> None:
    """An older request grows into the pages that the younger one, the case, holds."""
    num_pages = 12
    with serve(kind, "--num-blocks", str(num_pages), "--safety-margin", "0", "--max-batch-tokens", "256") as server:
        for case in cases:
            answer = evicted(server, case, num_pages)
            label = f"{kind} evicted, prompt of {len(case.prompt)}"
            reference = case.reference
            comparisons.expect(answer.ids, reference.ids, reference.gaps, what=label)


def evicted(server: LiveServer, case: Case, num_pages: int) -> Answer:
    """The answer of a run in which the request lost its pages; it may take a few tries for the two to meet."""
    case_pages = -(-len(case.prompt) // PAGE)
    older = [5] * (PAGE * (num_pages - case_pages - 1))  # it decodes one page full, then wants another
    with Client(server.target) as client:
        for _ in range(10):
            with client.generate(older, max_new_tokens=3 * PAGE, ignore_eos=True, temperature=0.0) as events:
                next(events)  # it has started
                added = client.add_request(
                    case.prompt, max_new_tokens=NUM_TOKENS_EVICTED, ignore_eos=True, temperature=0.0
                )
                for _ in events:
                    pass
            answer = read(client, added.request_id)
            if answer.finished.timings.preemptions:
                return answer
            flush(server)
    raise AssertionError("the request was never evicted")
