"""Pause, resume, drain, stop and other weights on the real service: what stands still, goes on exactly."""

from __future__ import annotations

import contextlib
import math
import queue
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from chairlift_client import (
    AdminClient,
    ChairliftError,
    Client,
    DeadlineExceededError,
    Delta,
    Finished,
    InvalidRequestError,
    PreconditionError,
    ServerState,
    UnavailableError,
    WeightsUpdate,
)
from safetensors.torch import load_file, save_file
from support.idle import Footprint, assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import CONFIGS, generate_ids, reference_logits, tiny_model, write_model

PAGE = 4
NUM_BLOCKS = 220
SIZES = ("--page-size", str(PAGE), "--num-blocks", str(NUM_BLOCKS), "--max-batch-tokens", "48")
SIZES += ("--fault-injection", "slow:4")  # steps that any machine is some time at
GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = 440  # tokens: some seconds
LENGTH = 260  # tokens: three such requests fit the cache together


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights of the same architecture: those that are served at first, and two others."""
    root = tmp_path_factory.mktemp("weights")
    others = {name: write_model(root / name, CONFIGS["llama"](), seed=seed) for name, seed in (("b", 11), ("c", 12))}
    return {"a": tiny_model("llama"), **others}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tiny_model("llama"), "--dtype", "float32", *SIZES) as running:
        with Client(running.target) as client:
            client.complete([5, 6, 7], max_new_tokens=2, **GREEDY)
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.target) as client:
        client.get_model()
        yield client


@pytest.fixture
def admin(server: LiveServer, folders: dict[str, Path]) -> Iterator[AdminClient]:
    """Leaves the service as it was, with the first weights, whatever the test did; nothing may be left of it."""
    with AdminClient(server.admin_target) as admin, Client(server.target) as client:
        admin.flush_prefix_cache()
        client.get_model()
        before = Footprint.of(server)
        yield admin
        with contextlib.suppress(PreconditionError):
            admin.resume(timeout=10)
        admin.pause(timeout=10)
        admin.update_weights(folders["a"], timeout=30)
        admin.resume(timeout=10)
        assert_idle(server, before)


def prompt(number: int) -> list[int]:
    return [4 + (number * 37 + i * i * 11) % 370 for i in range(3 + number * 5)]


@dataclass
class Reader:
    """Reads a stream in a thread of its own."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: Finished | None = None
    error: ChairliftError | None = None
    _thread: threading.Thread | None = None
    _news: queue.Queue[int] = field(default_factory=lambda: queue.Queue(maxsize=10_000))

    @classmethod
    def of(cls, client: Client, number: int, max_new_tokens: int, **options: object) -> Reader:
        reader = cls()
        events = client.generate(prompt(number), max_new_tokens=max_new_tokens, **{**GREEDY, **options})  # type: ignore[arg-type] # of GenerateOptions
        reader._thread = threading.Thread(target=reader._read, args=(events,), daemon=True)
        reader._thread.start()
        return reader

    def wait_for(self, num_tokens: int) -> None:
        while len(self.ids) < num_tokens:
            self._news.get(timeout=30)

    def end(self) -> Reader:
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stream does not end"
        return self

    def _read(self, events: Iterator[object]) -> None:
        try:
            for event in events:
                if isinstance(event, Delta):
                    self.ids.extend(event.token_ids)
                    self.logprobs.extend(entry.chosen for entry in event.logprobs)
                    self._news.put(len(self.ids))
                elif isinstance(event, Finished):
                    self.finished = event
        except ChairliftError as error:
            self.error = error


def wanted(folder: Path, number: int, num_tokens: int) -> list[int]:
    """What transformers' generate says."""
    return generate_ids(folder, prompt(number), num_tokens).ids


def expect_greedy(folder: Path, number: int, ids: list[int], num_tokens: int, *, start: int = 0) -> None:
    """So many ids, each of which, from `start` on, is the best after all before it, by transformers' logits.

    The same as comparing with `generate`, in one forward pass.
    """
    assert len(ids) == num_tokens
    best = reference_logits(folder, [*prompt(number), *ids]).argmax(-1).tolist()
    first = len(prompt(number)) - 1
    assert ids[start:] == best[first + start : first + num_tokens]


def counted(client: Client, name: str) -> int:
    return client.get_server().statistics[name]


def eventually(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_streams_paused_in_the_middle_for_a_second_go_on_to_transformers_ids(
    client: Client, admin: AdminClient, folders: dict[str, Path]
) -> None:
    readers = {number: Reader.of(client, number, 120) for number in (1, 2, 3)}
    for reader in readers.values():
        reader.wait_for(4)
    admin.pause()
    computed, at = counted(client, "computed_tokens"), {n: len(reader.ids) for n, reader in readers.items()}
    queued = Reader.of(client, 4, 10)
    time.sleep(1.0)
    assert counted(client, "computed_tokens") == computed
    assert client.get_server().state is ServerState.PAUSED
    assert client.health().name == "SERVING"
    assert client.get_server().statistics["requests_running"] == 3
    assert all(len(reader.ids) - at[n] <= 2 for n, reader in readers.items())  # what was on its way
    assert queued.ids == []
    admin.resume()
    for number, reader in readers.items():
        expect_greedy(folders["a"], number, reader.end().ids, 120)
        assert reader.finished is not None
        assert reader.finished.timings.preemptions == 0
    assert queued.end().ids == wanted(folders["a"], 4, 10)


def test_cancel_and_deadline_work_while_paused(client: Client, admin: AdminClient, folders: dict[str, Path]) -> None:
    cancelled = Reader.of(client, 1, LONG, request_id="cancelled")
    late = Reader.of(client, 2, LONG, timeout=1.5)
    stays = Reader.of(client, 3, 40)
    for reader in (cancelled, late, stays):
        reader.wait_for(1)
    admin.pause()
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        client.complete(prompt(4), max_new_tokens=5, timeout=0.3, **GREEDY)
    assert 0.3 <= time.monotonic() - began < 3
    assert client.cancel("cancelled")["cancelled"].name == "CANCELLED"
    assert cancelled.end().finished is not None
    assert cancelled.finished is not None
    assert cancelled.finished.reason.name == "CANCELLED"
    assert isinstance(late.end().error, DeadlineExceededError)
    eventually(lambda: counted(client, "requests_running") == 1)
    admin.resume()
    expect_greedy(folders["a"], 3, stays.end().ids, 40)


def test_a_pause_longer_than_the_watch_keeps_the_worker(client: Client, admin: AdminClient) -> None:
    pids = client.get_server().worker_pids
    reader = Reader.of(client, 1, 30)
    reader.wait_for(1)
    admin.pause()
    time.sleep(2.5)  # the heartbeat is looked at every second
    assert client.get_server().worker_pids == pids
    admin.resume()
    assert len(reader.end().ids) == 30


def test_a_drain_lets_open_streams_end_refuses_new_ones_and_can_be_taken_back(
    client: Client, admin: AdminClient, folders: dict[str, Path]
) -> None:
    readers = {number: Reader.of(client, number, 150) for number in (1, 2)}
    for reader in readers.values():
        reader.wait_for(1)
    with pytest.raises(DeadlineExceededError):
        admin.drain(timeout=0.05)
    assert client.health().name == "NOT_SERVING"
    with pytest.raises(PreconditionError) as refused:
        client.complete(prompt(3), max_new_tokens=1, **GREEDY)
    assert refused.value.reason == "DRAINING"
    admin.drain(timeout=60)
    for number, reader in readers.items():
        expect_greedy(folders["a"], number, reader.end().ids, 150)
    assert client.get_server().state is ServerState.DRAINING
    admin.resume()
    assert client.health().name == "SERVING"
    assert list(client.complete(prompt(3), max_new_tokens=12, **GREEDY).token_ids) == wanted(folders["a"], 3, 12)


@pytest.mark.parametrize("paused", [False, True])
def test_after_a_hard_stop_and_a_resume_the_same_worker_answers_exactly(
    client: Client, admin: AdminClient, folders: dict[str, Path], paused: bool
) -> None:
    pids = client.get_server().worker_pids
    readers = [Reader.of(client, number % 5, LONG) for number in range(20)]  # more than the cache can hold
    eventually(lambda: counted(client, "requests_running") + counted(client, "requests_waiting") == 20)
    client.add_request(prompt(1), max_new_tokens=LONG, request_id="detached", **GREEDY)
    if paused:
        admin.pause()
    assert admin.stop(timeout=30) == 21
    assert client.get_server().state is ServerState.STOPPED
    for reader in readers:
        assert isinstance(reader.end().error, UnavailableError)
        assert reader.error is not None
        assert reader.error.reason == "STOPPED"
    with pytest.raises(UnavailableError) as refused:
        client.add_request(prompt(1), **GREEDY)
    assert refused.value.reason == "STOPPED"
    figures = client.get_server().statistics
    assert figures["requests_running"] == figures["requests_waiting"] == 0
    admin.resume()
    for number in range(5):
        answer = client.complete(prompt(number), max_new_tokens=12, **GREEDY)
        assert list(answer.token_ids) == wanted(folders["a"], number, 12)
    assert client.get_server().worker_pids == pids
    client.cancel("detached")


def test_the_loop_of_reinforcement_learning(client: Client, admin: AdminClient, folders: dict[str, Path]) -> None:
    """Generate with logprobs, pause, other weights, resume; twice, with requests in flight all the time."""
    others = counted(client, "generated_tokens") + 20  # all but what the readers get
    evicted = counted(client, "preemptions_recompute")
    readers = {number: Reader.of(client, number, LENGTH, logprobs=1) for number in (1, 2, 3)}
    old = client.complete(prompt(5), max_new_tokens=20, logprobs=1, **GREEDY)
    expect_logprobs(folders["a"], 5, list(old.token_ids), [entry.chosen for entry in old.choices[0].logprobs], start=0)
    for reader in readers.values():
        reader.wait_for(5)
    spans = {number: [("a", 0)] for number in readers}
    for name in ("b", "c"):
        assert admin.pause() == 3
        theirs = counted(client, "generated_tokens") - others
        wait_for_ids(readers, theirs)
        for number, reader in readers.items():
            spans[number].append((name, len(reader.ids)))
        update = admin.update_weights(folders[name])
        assert isinstance(update, WeightsUpdate)
        assert update.num_requests == 3
        assert update.num_tensors == 20  # embeddings, 9 in each of two layers, the last norm; the head is tied
        figures = client.get_server().statistics
        assert figures["blocks_free"] == NUM_BLOCKS  # nothing computed with the old weights is left
        assert figures["preemptions_recompute"] == evicted
        queued = Reader.of(client, 4, 12, logprobs=1)
        admin.resume()
        assert queued.end().ids == wanted(folders[name], 4, 12)
        others += 12
        expect_logprobs(folders[name], 4, queued.ids, queued.logprobs, start=0)
        for reader in readers.values():
            reader.wait_for(len(reader.ids) + 5)
    for number, reader in readers.items():
        reader.end()
        assert len(reader.ids) == LENGTH
        ends = [start for _, start in spans[number][1:]] + [LENGTH]
        for (name, start), end in zip(spans[number], ends, strict=True):
            expect_greedy(folders[name], number, reader.ids[:end], end, start=start)
            expect_logprobs(folders[name], number, reader.ids[:end], reader.logprobs[start:end], start=start)
        assert reader.finished is not None
        assert reader.finished.usage.generated_tokens == LENGTH
        assert reader.finished.timings.preemptions == 0


def wait_for_ids(readers: dict[int, Reader], num_ids: int) -> None:
    """Waits until all of them together have so many."""
    eventually(lambda: sum(len(reader.ids) for reader in readers.values()) == num_ids)


def expect_logprobs(folder: Path, number: int, ids: list[int], logprobs: list[float], *, start: int) -> None:
    """At temperature 0 they are the log-softmax of the model's logits."""
    whole = [*prompt(number), *ids]
    logits = reference_logits(folder, whole).log_softmax(-1)
    first = len(prompt(number)) + start
    for offset, logprob in enumerate(logprobs):
        assert math.isclose(logprob, float(logits[first + offset - 1, whole[first + offset]]), abs_tol=1e-4)


@pytest.mark.parametrize(
    "processors",
    [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2, "min_new_tokens": 90}],
    ids=["plain", "processors"],
)
def test_seeded_sampling_goes_on_with_the_new_weights_as_if_it_had_begun_there(
    client: Client, admin: AdminClient, folders: dict[str, Path], processors: dict[str, float]
) -> None:
    """The noise belongs to seed and token index: an update in the middle to the same weights changes nothing."""
    options = {"temperature": 0.9, "top_k": 20, "seed": 7, **processors}
    undisturbed = client.complete(prompt(2), max_new_tokens=100, **{**GREEDY, **options})
    reader = Reader.of(client, 2, 100, **options)
    reader.wait_for(5)
    admin.pause()
    assert admin.update_weights(folders["a"]).num_requests == 1
    admin.resume()
    assert reader.end().ids == list(undisturbed.token_ids)


def test_prefixes_computed_with_old_weights_are_not_found_again(
    client: Client, admin: AdminClient, folders: dict[str, Path]
) -> None:
    shared = prompt(8)
    for _ in range(2):
        first = client.complete(shared, max_new_tokens=4, **GREEDY)
    assert first.accepted.cached_tokens == (len(shared) - 1) // PAGE * PAGE
    admin.pause()
    assert admin.update_weights(folders["b"]).num_blocks > 0
    admin.resume()
    again = client.complete(shared, max_new_tokens=4, **GREEDY)
    assert again.accepted.cached_tokens == 0
    assert list(again.token_ids) == wanted(folders["b"], 8, 4)


def test_weights_are_taken_only_while_paused(client: Client, admin: AdminClient, folders: dict[str, Path]) -> None:
    for enter in (lambda: None, admin.stop):
        enter()
        with pytest.raises(PreconditionError) as refused:
            admin.update_weights(folders["b"])
        assert refused.value.reason == "WRONG_STATE"
    admin.resume()
    assert list(client.complete(prompt(1), max_new_tokens=8, **GREEDY).token_ids) == wanted(folders["a"], 1, 8)


def test_weights_that_do_not_fit_are_refused_by_name_and_what_is_in_flight_goes_on_with_the_old_ones(
    client: Client, admin: AdminClient, folders: dict[str, Path], tmp_path: Path
) -> None:
    whole = load_file(folders["b"] / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    without = {key: tensor for key, tensor in whole.items() if key != name}
    bad = {
        f"missing in its files: {name}": without,
        "does not have: extra.weight": {**whole, "extra.weight": torch.ones(2)},
        f"of another shape than the running model's: {name}": {**whole, name: whole[name][:, :-1].contiguous()},
    }
    reader = Reader.of(client, 1, 100)
    reader.wait_for(3)
    admin.pause()
    kept = counted(client, "blocks_free")
    for number, (message, tensors) in enumerate(bad.items()):
        folder = tmp_path / str(number)
        shutil.copytree(folders["b"], folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InvalidRequestError) as refused:
            admin.update_weights(folder)
        assert refused.value.reason == "INVALID_WEIGHTS"
        assert message in refused.value.message
    with pytest.raises(InvalidRequestError):
        admin.update_weights(tmp_path / "nowhere")
    with pytest.raises(InvalidRequestError):
        admin.update_weights("relative")
    assert counted(client, "blocks_free") == kept
    assert client.get_server().state is ServerState.PAUSED
    admin.resume()
    expect_greedy(folders["a"], 1, reader.end().ids, 100)


def test_operations_at_random_with_requests_coming_and_going_leave_every_answer_whole(
    client: Client, admin: AdminClient, folders: dict[str, Path]
) -> None:
    rng = random.Random(6)
    running: list[tuple[int, int, Reader]] = []
    for _ in range(25):
        number, length = rng.randrange(8), rng.randrange(1, 60)
        running.append((number, length, Reader.of(client, number, length)))
        time.sleep(rng.random() * 0.03)
        if rng.random() < 0.5:
            admin.pause()
            if rng.random() < 0.6:
                admin.update_weights(folders["a"])
            time.sleep(rng.random() * 0.05)
            admin.resume()
    for number, length, reader in running:
        expect_greedy(folders["a"], number, reader.end().ids, length)


def test_a_paused_service_that_is_told_to_end_lets_its_streams_end_first(folders: dict[str, Path]) -> None:
    with live_server(folders["a"], "--dtype", "float32", *SIZES) as server, Client(server.target) as client:
        reader = Reader.of(client, 1, 80)
        reader.wait_for(2)
        with AdminClient(server.admin_target) as admin:
            admin.pause()
        server.process.send_signal(signal.SIGTERM)
        expect_greedy(folders["a"], 1, reader.end().ids, 80)
        assert server.process.wait(20) == 0
