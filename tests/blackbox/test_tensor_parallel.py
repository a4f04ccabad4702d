"""One worker as several processes (`--tp-size`): ids are still transformers' own, whatever befalls a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chairlift_client import AdminClient, Client, Delta, InvalidRequestError
from chairlift_worker.plan import SampleSpec
from support.exactness import Comparisons
from support.idle import Footprint, assert_idle
from support.live_server import LiveServer, live_server
from support.sampling_reference import reference_choice
from support.tiny_models import CONFIGS, generate_ids, reference_logits, tiny_model, write_model

GREEDY = {"temperature": 0.0, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "top_k": 0, "seed": 7, "ignore_eos": True}
NUM_TOKENS = 32
# A cache for about a third of all streams, swap for some of the rest, several steps to each prompt.
CRAMPED = (
    *("--page-size", "4", "--num-blocks", "64", "--cpu-offload-space", "0.01", "--safety-margin", "0"),
    *("--max-prefill-chunk", "16", "--max-batch-tokens", "48", "--step-timeout", "3"),
)
# Sums of parts are rounded otherwise than a sum: this is how far log-probabilities in float32 may be apart.
LOGPROB_BOUND = 1e-4
GONE_S = 5.0  # however the service ends, its worker is gone by then


def prompt(number: int) -> list[int]:
    """All share their first page."""
    return [5, 6, 7, 8, *(4 + (number * 41 + i * i * 7) % 370 for i in range(2 + 5 * number))]


def stream_all(server: LiveServer, numbers: range, num_tokens: int = NUM_TOKENS) -> dict[int, list[int]]:
    """Greedy ids of all prompts at once, each read by a thread of its own."""
    answers: dict[int, list[int]] = {}

    def one(number: int) -> None:
        with Client(server.target) as client:
            answers[number] = list(client.complete(prompt(number), max_new_tokens=num_tokens, **GREEDY).token_ids)

    threads = [threading.Thread(target=one, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return answers


def expect_own_ids(server: LiveServer, folder: Path, numbers: range, *, what: str) -> None:
    """Twice, so that the second time the prefix cache has something."""
    comparisons = Comparisons()
    for _ in range(2):
        answers = stream_all(server, numbers)
        for number in numbers:
            reference = generate_ids(folder, prompt(number), NUM_TOKENS)
            comparisons.expect(answers[number], reference.ids, reference.gaps, what=f"{what}, prompt {number}")
    comparisons.check_ties()


def expect_gone(pids: tuple[int, ...]) -> None:
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"still there after {GONE_S} s: {left}"
        time.sleep(0.01)


def lose_rank(server: LiveServer, folder: Path, rank: int, number: signal.Signals) -> None:
    """Sends a rank a signal in mid-stream; greedy and seeded streams say what they would have said."""
    with Client(server.target) as client:
        undisturbed = client.complete(prompt(4), max_new_tokens=60, **SEEDED).token_ids
        pids = client.get_server().worker_pids
        seeded: list[int] = []

        def read_seeded() -> None:
            with Client(server.target) as other:
                seeded.extend(other.complete(prompt(4), max_new_tokens=60, **SEEDED).token_ids)

        beside = threading.Thread(target=read_seeded)
        beside.start()
        ids: list[int] = []
        is_over = False
        with client.generate(prompt(2), max_new_tokens=60, **GREEDY) as events:
            for event in events:
                if isinstance(event, Delta):
                    assert event.index == len(ids), "tokens lost or doubled"
                    ids.extend(event.token_ids)
                    if len(ids) >= 12 and not is_over:
                        os.kill(pids[rank], number)
                        is_over = True
        beside.join(60)
        assert ids == generate_ids(folder, prompt(2), 60).ids
        assert tuple(seeded) == undisturbed
        expect_gone(pids)
        assert len(client.get_server().worker_pids) == len(pids)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tiny_model("qwen3"), "--dtype", "float32", "--tp-size", "2", *CRAMPED) as running:
        yield running


def test_two_ranks_say_what_transformers_says(server: LiveServer) -> None:
    with Client(server.target) as client:
        client.complete([5], max_new_tokens=2, **GREEDY)
        before = Footprint.of(server)
        info = client.get_server()
        assert len(info.worker_pids) == len(set(info.worker_pids)) == 2
        config = {setting.name: setting for setting in info.config}
        assert config["tp_size"].value == "2"
        assert config["model_impl"].value == "transformers"
        assert "tp_size = 2" in config["model_impl"].reason
        expect_own_ids(server, tiny_model("qwen3"), range(8), what="tp 2")
        figures = assert_idle(server, before).statistics
    assert figures["cached_prompt_tokens"] > 0
    assert figures["preemptions_swap"] > 0, "nothing was swapped: the test means nothing"


def test_one_rank_samples_for_all(server: LiveServer) -> None:
    """At temperature 1 the ids are those of the definition, by transformers' logits of the ids so far."""
    with Client(server.target) as client:
        answer = client.complete(prompt(1), max_new_tokens=50, logprobs=1, **SEEDED)
    ids, off = prompt(1), 0.0
    for index, (got, logprob) in enumerate(zip(answer.token_ids, answer.choices[0].logprobs, strict=True)):
        spec = SampleSpec(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, index=index, logprob=True)
        token, wanted = reference_choice(reference_logits(tiny_model("qwen3"), ids)[-1], spec)
        assert got == token, f"token {index}"
        off = max(off, abs(logprob.chosen - wanted))
        ids.append(token)
    print(f"log-probabilities of two ranks differ from transformers' by {off:.1e} at most")
    assert off < LOGPROB_BOUND


def test_ranks_listen_on_loopback_alone(server: LiveServer) -> None:
    with Client(server.target) as client:
        pids = client.get_server().worker_pids
    sockets = [connection for pid in pids for connection in psutil.Process(pid).net_connections("inet")]
    assert sockets
    assert {connection.laddr.ip.removeprefix("::ffff:") for connection in sockets} == {"127.0.0.1"}


def test_a_stream_that_is_left_leaves_nothing_in_any_rank(server: LiveServer) -> None:
    with Client(server.target) as client:
        client.get_model()
        before = Footprint.of(server)
        for number in range(6):
            with client.generate(prompt(number), max_new_tokens=200, **GREEDY) as events:
                next(events)
                next(events)
        assert_idle(server, before)
        expect_own_ids(server, tiny_model("qwen3"), range(2), what="after cancellations")


def test_other_weights_reach_all_ranks_or_none(server: LiveServer, tmp_path: Path) -> None:
    first, other = tiny_model("qwen3"), write_model(tmp_path / "other", CONFIGS["qwen3"](), seed=11)
    bad = write_model(tmp_path / "bad", CONFIGS["llama"](), seed=1)
    with Client(server.target) as client, AdminClient(server.admin_target) as admin:
        pids = client.get_server().worker_pids
        for folder, wanted in ((other, other), (bad, other), (first, first)):
            admin.pause()
            if folder == bad:
                with pytest.raises(InvalidRequestError):
                    admin.update_weights(folder, timeout=60)
            else:
                admin.update_weights(folder, timeout=60)
            admin.resume()
            ids = client.complete(prompt(3), max_new_tokens=20, **GREEDY).token_ids
            assert list(ids) == generate_ids(wanted, prompt(3), 20).ids
        admin.flush_prefix_cache()
        assert client.get_server().worker_pids == pids


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_kill_9_of_a_rank_is_the_loss_of_the_worker_and_streams_go_on(server: LiveServer, rank: int) -> None:
    lose_rank(server, tiny_model("qwen3"), rank, signal.SIGKILL)
    assert_idle(server)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_the_loss_of_the_worker(server: LiveServer, rank: int) -> None:
    lose_rank(server, tiny_model("qwen3"), rank, signal.SIGSTOP)
    assert_idle(server)


FLAGS = {
    "llama": ("3", ()),  # 9 query heads, 3 key-value heads
    "gemma3": ("2", ()),  # sliding and full layers
    "gemma2": ("2", ("--attn-implementation", "sdpa")),
    "mistral": ("2", ("--attn-implementation", "eager")),
    "untied": ("3", ("--use-async-batching",)),
    "qwen3": ("2", ("--speculative", "ngram", "--prompt-lookup-min", "1")),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", FLAGS)
def test_models_and_modes(kind: str) -> None:
    tp_size, flags = FLAGS[kind]
    folder = tiny_model(kind)
    with live_server(folder, "--dtype", "float32", "--tp-size", tp_size, *CRAMPED, *flags) as server:
        expect_own_ids(server, folder, range(8), what=kind)
        figures = assert_idle(server).statistics
        assert figures["preemptions_swap"] + figures["preemptions_recompute"] > 0
        if "--speculative" in flags:
            with Client(server.target) as client:
                client.complete([5, 6, 7] * 12, max_new_tokens=100, **GREEDY)
                assert client.get_server().statistics["draft_tokens"] > 0


@pytest.mark.full
def test_three_ranks_share_smollm2() -> None:
    """9 query heads and 3 key-value heads: with one rank, with three, and by transformers the same ids."""
    text = "The lift never stops, and chairs"
    flags = ("--dtype", "float32", "--num-blocks", "64")
    answers = {}
    for tp_size in ("1", "3"):
        with live_server("demo", *flags, "--tp-size", tp_size) as server, Client(server.target) as client:
            answers[tp_size] = client.complete(text, max_new_tokens=40, logprobs=1, **GREEDY)
            assert_idle(server)
    assert answers["3"].token_ids == answers["1"].token_ids
    off = max(
        abs(one.chosen - other.chosen)
        for one, other in zip(answers["3"].choices[0].logprobs, answers["1"].choices[0].logprobs, strict=True)
    )
    print(f"log-probabilities of three ranks differ from those of one by {off:.1e} at most")
    assert off < LOGPROB_BOUND


@pytest.mark.full
def test_a_rank_that_does_not_answer_within_cpu_group_timeout_ends_the_worker() -> None:
    """Long before step_timeout would."""
    folder = tiny_model("qwen3")
    flags = ("--dtype", "float32", "--tp-size", "2", "--cpu-group-timeout", "2")
    with live_server(folder, *flags) as server, Client(server.target) as client:
        time.sleep(3)  # an idle worker is not late
        assert client.get_server().statistics["worker_restarts"] == 0
        lose_rank(server, folder, 1, signal.SIGSTOP)
        assert client.get_server().statistics["worker_restarts"] == 1
        assert "cpu_group_timeout = 2 s" in server.log()
        assert_idle(server)


@pytest.mark.parametrize("state", ["decoding", pytest.param("idle", marks=pytest.mark.full)])
def test_kill_9_of_the_service_takes_all_ranks_with_it(state: str) -> None:
    flags = ("--dtype", "float32", "--tp-size", "2", "--fault-injection", "slow:5")
    with live_server(tiny_model("qwen3"), *flags, expect_exit=None) as server, Client(server.target) as client:
        pids = client.get_server().worker_pids
        if state == "decoding":
            client.add_request([5, 6], max_new_tokens=400, **GREEDY)
            while client.get_server().statistics["generated_tokens"] < 5:
                time.sleep(0.005)
        server.process.send_signal(signal.SIGKILL)
        expect_gone(pids)


@pytest.mark.full
@pytest.mark.parametrize("who", ["service", "rank 0", "rank 1"])
@pytest.mark.parametrize("after_s", [0.2, 3.0, 6.0])  # importing torch, loading, warming
def test_kill_9_at_load_leaves_nothing(who: str, after_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="cl-") as folder:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("chairlift-serve")),
                *("--model", str(tiny_model("qwen3")), "--listen", f"unix:{folder}/s", "--tp-size", "2"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        family = psutil.Process(process.pid)
        while len(ranks := family.children()) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(after_s)
        pids = tuple(rank.pid for rank in ranks)
        if who == "service":
            process.kill()
        else:
            os.kill(pids[int(who.removeprefix("rank "))], signal.SIGKILL)
            assert process.stderr is not None
            last = process.communicate(timeout=30)[1].splitlines()[-1]
            assert process.returncode == 1
            assert last == f"chairlift-serve: worker: ended with {who}: signal SIGKILL before it could serve"
        process.wait(GONE_S)
        expect_gone(pids)


@pytest.mark.parametrize(
    ("kind", "flags", "said"),
    [
        ("llama", ("--tp-size", "2"), "tp_size = 2 does not divide its 3 key-value heads (and 9 query heads)"),
        pytest.param(
            "gpt2",
            ("--tp-size", "2"),
            "tp_size = 2: transformers has no tensor parallel plan for gpt2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "qwen3",
            ("--tp-size", "2", "--model-impl", "native"),
            "model_impl = native: not with tp_size = 2: the native decoder computes whole layers",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line(kind: str, flags: tuple[str, ...], said: str) -> None:
    with tempfile.TemporaryDirectory(prefix="cl-") as folder:
        ended = subprocess.run(
            [
                str(Path(sys.executable).with_name("chairlift-serve")),
                *("--model", str(tiny_model(kind)), "--listen", f"unix:{folder}/s", *flags),
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.splitlines()[-1].startswith("chairlift-serve: ")
    assert ended.stderr.splitlines()[-1].endswith(said)
