"""A service of a model with sliding layers: exact, without prefix sharing, and able to run far past its window."""

from __future__ import annotations

from pathlib import Path

import pytest
from chairlift_client import AdminClient, Client, Delta, Finished
from support.exactness import Comparisons
from support.live_server import live_server
from support.tiny_models import generate_ids, tiny_model

PROMPTS = [[(7 * i * i + 31 * i) % 373 + 4 for i in range(start, 2 * start)] for start in (9, 10, 11, 30, 100)]
NUM_TOKENS = 12


def ids_of(client: Client, folder: Path, prompt: list[int], comparisons: Comparisons, num_tokens: int) -> Finished:
    reference = generate_ids(folder, prompt, num_tokens)
    tokens: list[int] = []
    with client.generate(prompt, max_new_tokens=num_tokens, ignore_eos=True, temperature=0.0) as events:
        for event in events:
            match event:
                case Delta() as delta:
                    tokens.extend(delta.token_ids)
                case Finished() as finished:
                    comparisons.expect(tokens, reference.ids, reference.gaps, what=f"prompt of {len(prompt)}")
                    return finished
                case _:
                    pass
    raise AssertionError("a stream without an ending")


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_answers_are_exact_and_nothing_is_found_again(kind: str) -> None:
    folder, comparisons = tiny_model(kind), Comparisons()
    flags = ("--dtype", "float32", "--page-size", "4", "--num-blocks", "200", "--max-prefill-chunk", "7")
    with live_server(folder, *flags, "--no-model-defaults") as server, Client(server.target) as client:
        for prompt in [*PROMPTS, *PROMPTS]:
            finished = ids_of(client, folder, prompt, comparisons, NUM_TOKENS)
            assert finished.usage.cached_tokens == 0
    comparisons.check_ties()


def test_a_request_of_ten_windows_runs_in_a_cache_of_two() -> None:
    """The window of 10 and a step of 7 take 5 pages of 4 at most: of 30 pages' worth of tokens, in 5 pages."""
    folder, comparisons = tiny_model("mistral"), Comparisons()
    flags = ("--dtype", "float32", "--page-size", "4", "--num-blocks", "5", "--max-prefill-chunk", "7")
    with live_server(folder, *flags, "--no-model-defaults") as server, Client(server.target) as client:
        finished = ids_of(client, folder, PROMPTS[-1], comparisons, 20)
        assert finished.timings.preemptions == 0
        with AdminClient(server.admin_target) as admin:
            assert admin.flush_prefix_cache() == 0
    comparisons.check_ties()
