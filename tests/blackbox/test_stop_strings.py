"""Stop strings on the real service: the text is transformers' own up to the first of them, whatever happens meanwhile.

One service has drafts, so that several tokens come in a step; the other has a cache that is too small for its requests,
two steps in flight, and a worker that dies and is replaced.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chairlift_client import Client, Delta, Finished, FinishReason
from support.exactness import TIE_GAP
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.smollm2 import smollm2_folder
from support.tiny_models import VOCAB_SIZE, generate_ids, llama_config, write_model
from support.tokenizer_files import mostly_text
from support.whole_text import first_stop, minus_prompt
from tokenizers import Tokenizer

NUM_TOKENS = 60
FLAGS = {
    "drafts": ("--speculative", "ngram", "--max-prefill-chunk", "8"),
    "eviction and loss": (
        *("--use-async-batching", "--cpu-offload-space", "0.05", "--safety-margin", "0", "--page-size", "4"),
        *("--num-blocks", "90", "--max-prefill-chunk", "8", "--fault-injection", "crash:60"),
    ),
}
PROMPTS = {
    "drafts": "Copy: one chair, two chairs,\nthree chairs.\nCopy: one chair, two",
    "eviction and loss": "the quick brown fox,\njumps over",
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """What comes of the prompt without stops. `texts[n]` is the text of n tokens."""

    prompt: list[int]
    ids: list[int]
    texts: list[str]

    @property
    def text(self) -> str:
        return self.texts[-1]


@functools.cache
def folder_of(name: str) -> Path:
    if name == "drafts":
        return smollm2_folder()
    folder = Path(tempfile.mkdtemp(prefix="chairlift-stops-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_model(folder, llama_config())
    mostly_text(VOCAB_SIZE).save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def reference(name: str) -> Reference:
    library = Tokenizer.from_file(str(folder_of(name) / "tokenizer.json"))
    prompt = library.encode(PROMPTS[name]).ids
    made = generate_ids(folder_of(name), prompt, NUM_TOKENS)
    assert min(made.gaps) > TIE_GAP, "no tie excuses anything"
    texts = [minus_prompt(library, prompt, made.ids[:num], skip=True) for num in range(NUM_TOKENS + 1)]
    return Reference(prompt, made.ids, texts)


@pytest.fixture(scope="module", params=[pytest.param("drafts", marks=pytest.mark.full), "eviction and loss"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(name: str) -> Iterator[LiveServer]:
    with live_server(folder_of(name), "--dtype", "float32", *FLAGS[name]) as running:
        yield running


def across_borders(whole: Reference) -> list[str]:
    """Pieces of the text that begin two characters before a token's end and go on for two behind it."""
    ends = [len(text) for text in whole.texts if whole.text.startswith(text)]
    found = [whole.text[end - 2 : end + 2] for end in ends if 2 <= end <= len(whole.text) - 2]
    return [stop for stop in dict.fromkeys(found) if "\ufffd" not in stop]


def stop_lists(whole: Reference) -> list[list[str]]:
    """The stops of each request."""
    across = across_borders(whole)
    assert len(across) > 8
    common = max(set(whole.text) - {"\ufffd"}, key=whole.text.count)
    return [
        *([stop] for stop in across[:: len(across) // 8]),
        [common + "\u2603"],  # begins all the time and is never complete
        [across[-1], across[-1] + "\u2603", across[-1][:2]],
        [across[-1][:3], across[-1]],
        ["\n"],  # a byte token of the second tokenizer
        [whole.text[-3:]],
        [whole.text[-1] + "\u2603"],
    ]


def check(server: LiveServer, whole: Reference, stops: list[str], max_new_tokens: int, interval: int) -> None:
    """The stream and the unary answer against the reference's text."""
    num, start, stop = first_stop(whole.texts[: max_new_tokens + 1], stops) or (max_new_tokens, None, None)
    text, reason = whole.texts[num][:start], FinishReason.LENGTH if stop is None else FinishReason.STOP
    options = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True, "stop": stops}
    deltas: list[Delta] = []
    with Client(server.target) as client:
        with client.generate(whole.prompt, stream_interval=interval, **options) as events:
            for event in events:
                if isinstance(event, Delta):
                    assert event.text or event.token_ids
                    deltas.append(event)
        assert isinstance(event, Finished)
        answer = client.complete(whole.prompt, **options)
    assert all(delta.num_tokens >= interval for delta in deltas[:-1])
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.token_ids] == whole.ids[:num]
    assert (event.reason, event.stop_text, event.usage.generated_tokens) == (reason, stop, num)
    finished = answer.choices[0].finished
    assert (answer.text, list(answer.token_ids)) == (text, whole.ids[:num])
    assert (finished.reason, finished.stop_text, finished.usage.generated_tokens) == (reason, stop, num)


def test_text_ends_before_the_first_stop_and_ids_with_the_token_that_completes_it(
    name: str, server: LiveServer
) -> None:
    whole = reference(name)
    cases: list[tuple[list[str], int]] = [(stops, NUM_TOKENS) for stops in stop_lists(whole)]
    (last,) = across_borders(whole)[4:5]
    found = first_stop(whole.texts, [last])
    assert found is not None
    cases += [([last], found[0] - 1), ([last], found[0]), ([last], found[0] + 1)]
    failures: list[BaseException] = []

    def one(number: int) -> None:
        stops, max_new_tokens = cases[number]
        try:
            check(server, whole, stops, max_new_tokens, interval=(1, 3, 8)[number % 3])
        except BaseException as error:  # noqa: BLE001 - of a thread; raised below
            failures.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for failure in failures:
        raise failure
    statistics = assert_idle(server).statistics
    if name == "drafts":
        assert statistics["accepted_draft_tokens"] > 0
    else:
        assert statistics["worker_restarts"] == 1
        assert statistics["preemptions_swap"] + statistics["preemptions_recompute"] > 0


def test_a_request_that_has_met_its_stop_costs_nothing_more(name: str, server: LiveServer) -> None:
    whole = reference(name)
    stop = across_borders(whole)[2]
    found = first_stop(whole.texts, [stop])
    assert found is not None
    before = assert_idle(server).statistics["generated_tokens"]
    with Client(server.target) as client:
        added = client.add_request(whole.prompt, max_new_tokens=400, temperature=0.0, ignore_eos=True, stop=stop)
        events = [each.event for each in client.result(added.request_id)]
        after = client.get_server().statistics["generated_tokens"]
        again = [each.event for each in client.result(added.request_id, from_index=found[0] - 1)]
        client.cancel(added.request_id)
    ids = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    assert ids == whole.ids[: found[0]]
    assert [event.token_ids for event in again if isinstance(event, Delta)] == [(ids[-1],)]
    assert again[-1] == events[-1]
    assert after - before < found[0] + 100
