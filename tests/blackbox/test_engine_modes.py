"""The engine's modes through the whole service: the ids are still transformers' own."""

from __future__ import annotations

import threading

import pytest
from chairlift_client import AdminClient, Client, Delta, Finished
from support.exactness import Comparisons
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import generate_ids, tiny_model

GREEDY = {"temperature": 0.0, "ignore_eos": True}
NUM_TOKENS = 40
TRACED = "backend=eager,fullgraph=true,dynamic=true"  # all that torch.compile does but the making of machine code
MODES = {
    "async": ("--use-async-batching",),
    "swap": ("--cpu-offload-space", "0.05", "--safety-margin", "0"),
    "async and swap": (
        *("--use-async-batching", "--cpu-offload-space", "0.05", "--safety-margin", "0"),
        *("--fault-injection", "slow:3"),  # so that the time in the pool can be seen
    ),
    "prefill_first": ("--scheduler-type", "prefill_first"),
    "async, compiled and captured": (
        "--use-async-batching",
        *("--use-cuda-graph", "--q-padding-interval-size", "16", "--kv-padding-interval-size", "64"),
        *("--varlen-compile-config", TRACED, "--decode-compile-config", TRACED),
    ),
}


def prompt(number: int) -> list[int]:
    return [4 + (number * 41 + i * i * 7) % 370 for i in range(5 + 6 * number)]


def stream_all(server: LiveServer, numbers: range) -> dict[int, tuple[list[int], Finished]]:
    """All prompts at once, each read by a thread of its own."""
    answers: dict[int, tuple[list[int], Finished]] = {}

    def one(number: int) -> None:
        ids: list[int] = []
        with (
            Client(server.target) as client,
            client.generate(prompt(number), max_new_tokens=NUM_TOKENS, **GREEDY) as events,
        ):
            for event in events:
                if isinstance(event, Delta):
                    ids.extend(event.token_ids)
                elif isinstance(event, Finished):
                    answers[number] = (ids, event)

    threads = [threading.Thread(target=one, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return answers


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_transformers_ids(mode: str, kind: str) -> None:
    folder, numbers = tiny_model(kind), range(10)
    wanted = {number: generate_ids(folder, prompt(number), NUM_TOKENS) for number in numbers}
    swaps = "swap" in mode
    # Where it is to swap, about a third of what all of them need.
    pages = {"llama": "80", "gemma3": "100"}[kind] if swaps else "600"
    args = ("--dtype", "float32", "--page-size", "4", "--num-blocks", pages, "--max-prefill-chunk", "16")
    comparisons = Comparisons()
    with live_server(folder, *args, *MODES[mode]) as server:
        for _ in range(2):
            answers = stream_all(server, numbers)
            assert set(answers) == set(numbers)
            for number, (ids, finished) in answers.items():
                reference = wanted[number]
                comparisons.expect(ids, reference.ids, reference.gaps, what=f"{mode}, {kind}, prompt {number}")
                assert finished.usage.generated_tokens == NUM_TOKENS
                assert finished.timings.preemptions <= 4
        figures = assert_idle(server).statistics
        with Client(server.target) as client:
            config = {setting.name: setting.value for setting in client.get_server().config}
        assert figures["swap_blocks_total"] == int(config["swap_blocks"])
        assert 0 < figures["busy_ns"] / figures["steps"] < 60e9
        if swaps:
            assert figures["preemptions_swap"] > 0, "nothing was swapped: the test means nothing"
            assert int(config["swap_blocks"]) > 0
            assert any(finished.timings.swapped > 0 for _, finished in answers.values())
        assert config["use_async_batching"] == str("async" in mode)
        graphs = {"llama": "True", "gemma3": "(True, False)"}[kind]  # models with windows have no fast path
        assert config["use_cuda_graph"] == (graphs if "captured" in mode else "False")
    comparisons.check_ties()


def test_a_pause_in_mid_stream_changes_nothing_with_async_batching_and_a_swap_pool() -> None:
    folder = tiny_model("llama")
    wanted = generate_ids(folder, prompt(3), 120)
    with live_server(folder, "--dtype", "float32", *MODES["async and swap"]) as server:
        with Client(server.target) as client, AdminClient(server.admin_target) as admin:
            ids: list[int] = []
            with client.generate(prompt(3), max_new_tokens=120, **GREEDY) as events:
                for event in events:
                    if isinstance(event, Delta):
                        ids.extend(event.token_ids)
                        if len(ids) == 20:
                            admin.pause()
                            admin.resume()
        assert ids == wanted.ids
        assert_idle(server)
