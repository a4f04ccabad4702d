"""HTTP in OpenAI's shape: the real gateway in front of two services, called by OpenAI's own client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from chairlift_client import AdminClient, Chat, Client
from support.gateway import Gateway, gateway
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import llama_config, write_model
from support.tokenizer_files import smollm2

MODEL = "tiny"
CONTEXT, CACHE = 512, 24 * 16  # tokens
TALK: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]
NUM_TOKENS = 24
LONG = 320  # tokens, which take some three seconds


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
    """Two services of one tiny model, which talks in SmolLM2's tokens and has its chat template."""
    folder = write_model(tmp_path_factory.mktemp("models") / MODEL, llama_config(vocab_size=49_152))
    smollm2(folder)
    args = ("--dtype", "float32", "--page-size", "16", "--num-blocks", str(CACHE // 16))
    args += ("--listen", "127.0.0.1:0", "--gateway", "on", "--fault-injection", "slow:10")
    with contextlib.ExitStack() as running, ThreadPoolExecutor(2) as pool:
        starting = (live_server(folder, *args), live_server(folder, *args))
        one, other = pool.map(running.enter_context, starting)  # at once: a start takes long
        yield one, other


@pytest.fixture(scope="module")
def front(servers: tuple[LiveServer, LiveServer]) -> Iterator[Gateway]:
    with gateway(*servers) as running:
        yield running


@pytest.fixture
def client(front: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.url, api_key="none", max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(servers: tuple[LiveServer, LiveServer]) -> Any:
    """The greedy answer that Chairlift's own client gets."""
    with Client(servers[0].target) as own:
        return own.complete(Chat(TALK), max_new_tokens=NUM_TOKENS, temperature=0.0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    options = {"model": MODEL, "messages": TALK, "max_tokens": NUM_TOKENS, "temperature": 0} | options
    return client.chat.completions.create(**options)


def generated(servers: tuple[LiveServer, LiveServer]) -> list[int]:
    """Tokens of each service."""
    counts = []
    for server in servers:
        with Client(server.target) as own:
            counts.append(own.get_server().statistics["generated_tokens"])
    return counts


def test_the_models_are_the_services(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat_answers_what_our_own_client_gets(client: openai.OpenAI, wanted: Any) -> None:
    answer = chat(client)
    (choice,) = answer.choices
    assert choice.message.content == wanted.text
    assert choice.finish_reason == wanted.reason.name.lower()
    assert answer.usage.prompt_tokens == wanted.accepted.prompt_tokens
    assert answer.usage.completion_tokens == len(wanted.token_ids)


def test_a_caller_who_says_nothing_of_sampling_gets_the_models_own(client: openai.OpenAI) -> None:
    said = {"model": MODEL, "messages": TALK, "max_tokens": 8}
    answers = {client.chat.completions.create(**said).choices[0].message.content for _ in range(2)}
    assert answers == {chat(client, max_tokens=8).choices[0].message.content}  # greedy: its do_sample is unset


def test_a_streamed_chat_comes_in_pieces_that_are_the_same_text(client: openai.OpenAI, wanted: Any) -> None:
    parts = list(chat(client, stream=True, stream_options={"include_usage": True}))
    texts = [choice.delta.content for part in parts for choice in part.choices if choice.delta.content]
    assert len(texts) > 3
    assert "".join(texts) == wanted.text
    (usage,) = [part.usage for part in parts if part.usage is not None]
    assert (usage.prompt_tokens, usage.completion_tokens) == (wanted.accepted.prompt_tokens, len(wanted.token_ids))


def test_a_completion_continues_the_text(client: openai.OpenAI, servers: tuple[LiveServer, LiveServer]) -> None:
    with Client(servers[0].target) as own:
        text = own.complete("Once upon a time", max_new_tokens=10, temperature=0.0).text
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=10, temperature=0)
    assert answer.choices[0].text == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_cuts_the_text_and_ends_the_request(client: openai.OpenAI, wanted: Any, *, stream: bool) -> None:
    middle = len(wanted.text) // 2
    stop = wanted.text[middle : middle + 4]
    before = wanted.text.partition(stop)[0]
    answer = chat(client, max_tokens=NUM_TOKENS, stop=["no such thing", stop], stream=stream)
    if stream:
        choices = [choice for part in answer for choice in part.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        reason = choices[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens < NUM_TOKENS
    assert (text, reason) == (before, "stop")


def test_log_probabilities_are_the_services(
    client: openai.OpenAI, servers: tuple[LiveServer, LiveServer], wanted: Any
) -> None:
    with Client(servers[0].target) as own:
        told = own.complete(Chat(TALK), max_new_tokens=6, temperature=0.0, logprobs=1).choices[0].logprobs
    entries = chat(client, max_tokens=6, logprobs=True).choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx([each.chosen for each in told], abs=1e-4)


def test_several_answers_are_the_services(
    client: openai.OpenAI, servers: tuple[LiveServer, LiveServer], wanted: Any
) -> None:
    options = {"temperature": 1.0, "seed": 11, "n": 3}
    with Client(servers[0].target) as own:
        told = own.complete(
            Chat(TALK), max_new_tokens=8, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11, num_choices=3
        )
    answer = chat(client, max_tokens=8, **options, extra_body={"top_k": -1, "min_p": 0.0})
    texts = {choice.index: choice.message.content for choice in answer.choices}
    assert texts == {index: choice.text for index, choice in enumerate(told.choices)}


def test_a_prompt_that_is_too_long_is_the_callers_fault(client: openai.OpenAI) -> None:
    # For the cache, as the service says, and for the context, as the gateway does.
    for num_words, limit in ((CACHE + 50, CACHE), (2 * CONTEXT, CONTEXT)):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt="a" + " a" * (num_words - 1), max_tokens=5)
        assert refused.value.status_code == 400
        assert str(limit) in refused.value.message


def test_penalties_reach_the_service(
    client: openai.OpenAI, servers: tuple[LiveServer, LiveServer], wanted: Any
) -> None:
    penalties = {"frequency_penalty": 1.5, "presence_penalty": -2.0}
    repetition = {"repetition_penalty": 0.01}  # so likely gets what the prompt has
    with Client(servers[0].target) as own:
        told = own.complete(Chat(TALK), max_new_tokens=8, temperature=0.0, **penalties, **repetition)
    got = chat(client, max_tokens=8, **penalties, extra_body=repetition).choices[0].message.content
    assert got == told.text
    assert told.token_ids != wanted.token_ids[:8]


def test_closing_a_stream_ends_the_request(client: openai.OpenAI, servers: tuple[LiveServer, LiveServer]) -> None:
    before = sum(generated(servers))
    stream = chat(client, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True})
    for number, _ in enumerate(stream):
        if number == 3:
            break
    stream.close()
    for server in servers:
        assert_idle(server)
    assert 0 < sum(generated(servers)) - before < LONG // 2


def test_a_caller_who_does_not_wait_for_the_answer_ends_the_request(
    client: openai.OpenAI, servers: tuple[LiveServer, LiveServer]
) -> None:
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5), max_tokens=LONG, extra_body={"ignore_eos": True})
    for server in servers:
        assert_idle(server)


def test_both_services_work(client: openai.OpenAI, servers: tuple[LiveServer, LiveServer], wanted: Any) -> None:
    before = generated(servers)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: chat(client).choices[0].message.content, range(6)))
    assert answers == [wanted.text] * 6
    assert all(now > then for then, now in zip(before, generated(servers), strict=True))


def test_while_one_service_drains_the_other_answers(
    client: openai.OpenAI, servers: tuple[LiveServer, LiveServer], wanted: Any
) -> None:
    with AdminClient(servers[0].admin_target) as admin:
        admin.drain()
        try:
            assert [chat(client).choices[0].message.content for _ in range(3)] == [wanted.text] * 3
        finally:
            admin.resume()


def test_the_gateway_takes_the_tokenizer_from_a_service(front: Gateway, client: openai.OpenAI) -> None:
    assert "Fetching tokenizer from worker" in front.log()
