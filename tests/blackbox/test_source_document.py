"""The examples of transformers' page on continuous batching, against the real service.

Each example stands as on the page; only the import and where the model comes from differ, and what it prints or
returns is compared with transformers' own greedy generate, one prompt at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import transformers
from chairlift_client import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    GenerationConfig,
    GenerationOutput,
    RemoteModel,
    RequestStatus,
    connect,
)
from support.exactness import Comparisons
from support.live_server import LiveServer, live_server
from support.tiny_models import EOS_ID, generate_ids, reference_logits, tiny_model

CONTEXT = 512
# The settings that the page's ContinuousBatchingConfig examples state.
STATED = {
    "max_memory_percent": "0.8",
    "page_size": "256",
    "max_batch_tokens": "16384",
    "max_requests_per_batch": "256",
    "num_blocks": "512",
}
PROMPTS = ["What's up?", "Name a cat breed.", "Write a detailed history of quantum mechanics."]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    flags = [part for name, value in STATED.items() for part in (f"--{name.replace('_', '-')}", value)]
    with live_server(tiny_model("llama"), "--dtype", "float32", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.fixture
def model(server: LiveServer) -> RemoteModel:
    return connect(server.target)


@pytest.fixture
def generation_config(tokenizer: transformers.PreTrainedTokenizerBase) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=64, eos_token_id=tokenizer.eos_token_id)


@pytest.fixture(scope="module")
def comparisons() -> Iterator[Comparisons]:
    counted = Comparisons()
    yield counted
    counted.check_ties()


@pytest.fixture
def manager(model: RemoteModel, generation_config: GenerationConfig) -> Iterator[ContinuousBatchingManager]:
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.start()
    yield manager
    manager.destroy()


@pytest.fixture
def expect(comparisons: Comparisons) -> Expect:
    return Expect(comparisons)


class Expect:
    """What transformers generates for the same prompt alone."""

    def __init__(self, comparisons: Comparisons) -> None:
        self._comparisons = comparisons

    def __call__(self, output: GenerationOutput, prompt: list[int], max_new_tokens: int) -> None:
        assert output.status == RequestStatus.FINISHED, output.error
        assert output.prompt_ids == prompt
        reference = generate_ids(tiny_model("llama"), prompt, max_new_tokens)
        ids = reference.ids
        ids = ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids
        self._comparisons.expect(output.generated_tokens, ids, reference.gaps, what=output.request_id)


def test_generate_batch(model, tokenizer, generation_config, expect, capsys) -> None:
    prompts = [
        "What's up?",
        "Name a cat breed.",
        "Write a detailed history of quantum mechanics.",
    ]
    inputs = [tokenizer.encode(p) for p in prompts]

    outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)

    for request_id, output in outputs.items():
        text = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        print(f"[{request_id}] {text}")

    assert len(outputs) == 3
    for prompt, output in zip(inputs, outputs.values(), strict=True):
        expect(output, prompt, 64)
    assert capsys.readouterr().out.count("[req_") == 3


def test_generate_batch_with_the_generation_config_of_transformers(model, tokenizer, expect) -> None:
    inputs = [tokenizer.encode(p) for p in ["What's up?", "Name a cat breed."]]
    generation_config = transformers.GenerationConfig(max_new_tokens=64, eos_token_id=tokenizer.eos_token_id)
    outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)
    for prompt, output in zip(inputs, outputs.values(), strict=True):
        expect(output, prompt, 64)


def test_the_context_manager_with_streams_of_different_lengths(
    model, tokenizer, generation_config, expect, capsys
) -> None:
    results = {}
    with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
        manager.add_request(
            input_ids=tokenizer.encode("Write a detailed history of quantum mechanics."),
            request_id="long",
            max_new_tokens=512,
        )
        manager.add_request(
            input_ids=tokenizer.encode("What's up?"),
            request_id="short_0",
            max_new_tokens=32,
        )
        manager.add_request(
            input_ids=tokenizer.encode("Name a cat breed."),
            request_id="short_1",
            max_new_tokens=32,
        )

        for result in manager:
            text = tokenizer.decode(result.generated_tokens, skip_special_tokens=True)
            print(f"[{result.request_id}] {text}")
            results[result.request_id] = result

    long_prompt = tokenizer.encode(PROMPTS[2])
    expect(results["long"], long_prompt, CONTEXT - len(long_prompt))  # 512 is lowered to what the context holds
    expect(results["short_0"], tokenizer.encode(PROMPTS[0]), 32)
    expect(results["short_1"], tokenizer.encode(PROMPTS[1]), 32)
    # The short ones left the batch while the long one went on.
    assert next(reversed(results)) == "long"
    out = capsys.readouterr().out
    assert all(f"[{name}] " in out for name in results)


def test_init_start_stop_and_start_again(model, tokenizer, generation_config, expect, caplog) -> None:
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.start()

    # submit and retrieve requests...
    input_ids = tokenizer.encode("What's up?")
    for _ in range(2):
        manager.add_request(input_ids=input_ids, request_id="my_request")
        manager.stop()

        with caplog.at_level(logging.WARNING):
            assert manager.add_request(input_ids=input_ids) is None
        assert "dropped" in caplog.text
        expect(manager.get_result(), input_ids, 64)
        manager.start()

    manager.destroy()
    with pytest.raises(RuntimeError):
        manager.start()


def test_a_hard_stop_fails_what_is_queued_and_active(model, tokenizer, server) -> None:
    manager = model.init_continuous_batching(generation_config=GenerationConfig(max_new_tokens=400, eos_token_id=-1))
    manager.start()
    for _ in range(20):
        manager.add_request(input_ids=tokenizer.encode("Name a cat breed."))

    manager.stop(hard_stop=True)

    failed = list(manager)
    assert len(failed) == 20
    assert all(f.status == RequestStatus.FAILED and "RuntimeError" in f.error for f in failed)
    manager.destroy()
    wait_until_idle(server)


def test_a_persistent_manager_is_kept_for_the_next_session(model, tokenizer, generation_config, expect) -> None:
    input_ids = tokenizer.encode("What's up?")
    managers = []
    for _ in range(2):
        with model.continuous_batching_context_manager(
            generation_config=generation_config, persistent_manager=True
        ) as manager:
            manager.add_request(input_ids=input_ids)
            expect(manager.get_result(timeout=60), input_ids, 64)
            managers.append(manager)
    assert managers[0] is managers[1]
    model.destroy_cached_continuous_batching_manager()


def test_adding_requests_one_by_one_and_as_a_batch(manager, tokenizer, expect) -> None:
    input_ids = tokenizer.encode("What's up?")
    inputs = [tokenizer.encode(p) for p in PROMPTS]

    manager.add_request(input_ids=input_ids, request_id="my_request")

    request_ids = manager.add_requests(inputs=inputs)

    results = {result.request_id: result for result in manager}
    expect(results["my_request"], input_ids, 64)
    for request_id, prompt in zip(request_ids, inputs, strict=True):
        expect(results[request_id], prompt, 64)


def test_cancelling_a_request(manager, tokenizer, server) -> None:
    input_ids = tokenizer.encode("What's up?")
    manager.add_request(
        input_ids=input_ids, request_id="my_request", max_new_tokens=450, eos_token_id=-1, streaming=True
    )
    assert manager.get_result(request_id="my_request", timeout=60) is not None

    manager.cancel_request(request_id="my_request")

    *_, last = manager.request_id_iter("my_request")
    assert last.finish_reason.name == "CANCELLED"
    assert 1 <= len(last.generated_tokens) < 450
    reference = generate_ids(tiny_model("llama"), input_ids, len(last.generated_tokens))
    assert last.generated_tokens == reference.ids
    wait_until_idle(server)


def test_sampling_parameters_per_request(model, tokenizer, generation_config) -> None:
    cb_config = ContinuousBatchingConfig(per_request_processors=True)
    inputs_a = tokenizer.encode("Write a poem.")
    inputs_b = tokenizer.encode("Add two and two.")

    def run(*, temperature: float, seed: int) -> list[list[int]]:
        with model.continuous_batching_context_manager(
            generation_config=generation_config, continuous_batching_config=cb_config
        ) as manager:
            # each request gets its own sampling parameters
            manager.add_request(input_ids=inputs_a, request_id="a", temperature=temperature, top_p=0.95, seed=seed)
            manager.add_request(input_ids=inputs_b, request_id="b", temperature=0.1, top_k=1, seed=seed)
            results = {result.request_id: result.generated_tokens for result in manager}
            return [results["a"], results["b"]]

    hot, only_best = run(temperature=5.0, seed=1)
    assert run(temperature=5.0, seed=1) == [hot, only_best]
    other_hot, still_best = run(temperature=5.0, seed=2)
    assert other_hot != hot
    # With top_k 1 nothing is left to chance, in the same forward passes as the other's sampling.
    greedy = generate_ids(tiny_model("llama"), inputs_b, 64).ids
    greedy = greedy[: greedy.index(EOS_ID) + 1] if EOS_ID in greedy else greedy
    assert only_best == still_best == greedy


def test_retrieving_results(manager, tokenizer, expect, capsys) -> None:
    inputs = [tokenizer.encode(p) for p in PROMPTS]
    manager.add_requests(inputs=inputs)

    for result in manager:
        print(tokenizer.decode(result.generated_tokens, skip_special_tokens=True))
    assert capsys.readouterr().out.count("\n") >= 3

    manager.add_request(input_ids=inputs[0])
    manager.add_request(input_ids=inputs[1], request_id="my_request")

    # filter for a specific request
    result = manager.get_result(request_id="my_request")
    expect(result, inputs[1], 64)

    # next available result
    result = manager.get_result()
    expect(result, inputs[0], 64)


def test_streaming(manager, tokenizer, expect, capsys) -> None:
    input_ids = tokenizer.encode("What's up?")
    chunks = []

    manager.add_request(input_ids=input_ids, request_id="streamed", streaming=True)

    for chunk in manager.request_id_iter(request_id="streamed"):
        token = tokenizer.decode(chunk.generated_tokens[-1:], skip_special_tokens=True)
        print(token, end="", flush=True)
        chunks.append((time.monotonic(), chunk))
        if chunk.status == RequestStatus.FINISHED:
            break

    expect(chunks[-1][1], input_ids, 64)
    ids = chunks[-1][1].generated_tokens
    assert [c.generated_tokens for _, c in chunks] == [ids[: i + 1] for i in range(len(ids))]
    expected = "".join(tokenizer.decode([i], skip_special_tokens=True) for i in ids)
    assert capsys.readouterr().out == expected
    # Tokens were there as they were generated, not all at the end.
    assert chunks[-1][0] - chunks[0][0] > 0.5 * (chunks[-1][1].lifespan[1] - chunks[0][1].lifespan[0])


def test_the_configuration_example(model, tokenizer, generation_config, expect) -> None:
    inputs = [tokenizer.encode(p) for p in PROMPTS]
    cb_config = ContinuousBatchingConfig(
        max_memory_percent=0.8,
        page_size=256,  # KV cache page size in tokens
        scheduler_type="fifo",  # "fifo" or "prefill_first"
    )

    outputs = model.generate_batch(
        inputs=inputs,
        generation_config=generation_config,
        continuous_batching_config=cb_config,
    )
    for prompt, output in zip(inputs, outputs.values(), strict=True):
        expect(output, prompt, 64)


@pytest.mark.parametrize("kind", [ContinuousBatchingConfig, transformers.generation.ContinuousBatchingConfig])
@pytest.mark.parametrize(
    "stated",
    [
        {"max_batch_tokens": 16384},
        {"max_requests_per_batch": 256},
        {"safety_margin": 0.15},
        {"allow_block_sharing": True},
        {"per_request_processors": True},
    ],
)
def test_settings_that_the_service_runs_with_may_be_stated(model, kind, stated) -> None:
    manager = model.init_continuous_batching(continuous_batching_config=kind(**stated))
    manager.destroy()


@pytest.mark.parametrize("kind", [ContinuousBatchingConfig, transformers.generation.ContinuousBatchingConfig])
@pytest.mark.parametrize("stated", [{"page_size": 128}, {"scheduler_type": "prefill_first"}, {"safety_margin": 0.5}])
def test_settings_that_the_service_does_not_run_with_are_refused_by_name(model, kind, stated) -> None:
    with pytest.raises(ValueError, match=next(iter(stated))):
        model.init_continuous_batching(continuous_batching_config=kind(**stated))


def test_log_probabilities(model, tokenizer, generation_config, capsys) -> None:
    inputs = [tokenizer.encode(p) for p in PROMPTS[:2]]
    cb_config = ContinuousBatchingConfig(return_logprobs=True)

    outputs = model.generate_batch(
        inputs=inputs, generation_config=generation_config, continuous_batching_config=cb_config
    )

    for output in outputs.values():
        for token_id, log_prob in zip(output.generated_tokens, output.logprobs, strict=True):
            token = tokenizer.decode([token_id])
            print(f"{token} | logprob: {log_prob}")

    assert "| logprob: " in capsys.readouterr().out
    for prompt, output in zip(inputs, outputs.values(), strict=True):
        logits = reference_logits(tiny_model("llama"), prompt + output.generated_tokens)[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1)[range(len(output.generated_tokens)), output.generated_tokens]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_a_manager_can_be_fed_from_many_threads(manager, tokenizer, expect) -> None:
    inputs = [tokenizer.encode(f"{i}: " + PROMPTS[i % 3]) for i in range(12)]
    results: dict[int, GenerationOutput | None] = {}

    def one(i: int) -> None:
        manager.add_request(input_ids=inputs[i], request_id=f"thread-{i}", max_new_tokens=16)
        results[i] = manager.get_result(request_id=f"thread-{i}", timeout=60)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for i, prompt in enumerate(inputs):
        expect(results[i], prompt, 16)


def wait_until_idle(server: LiveServer) -> None:
    """Until the service holds no request and all its pages are free."""
    from chairlift_client import Client

    with Client(server.target) as client:
        end = time.monotonic() + 10
        while True:
            found = client.get_server().statistics
            busy = found["requests_waiting"] + found["requests_running"] + found["requests_held"]
            if not busy and found["blocks_free"] + found["blocks_cached"] >= found["blocks_total"]:
                return
            assert time.monotonic() < end, f"still busy: {found}"
            time.sleep(0.05)
