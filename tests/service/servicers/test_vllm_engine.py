"""VllmEngine: answers, endings, and what gateways are told of the service."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from chairlift.v1 import info_service_pb2
from chairlift_service import gateway
from chairlift_service.config import ConfigError, load
from chairlift_service.sampling import choice_seed
from chairlift_service.servicers.vllm_engine.bundle import CHUNK_BYTES, pack
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
from support.fake_worker import CACHE_LEN, CACHED_TOKENS, CONTEXT_LEN, EOS_ID, ERROR_TOKEN, logprob
from support.served import Served, echo, eventually, generate, refusal, rest, serving
from support.tokenizer_files import byte_level, smollm2
from support.vllm_engine import PROMPT, answers, asked, stub

_pb = vllm_engine_pb2


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


async def statistics(served: Served) -> Any:
    return (await served.info.GetServer(info_service_pb2.GetServerRequest())).statistics


async def test_a_unary_answer_is_one_message(served: Served) -> None:
    chunks, complete = await answers(stub(served).Generate(asked(*PROMPT, max_tokens=10)))
    assert chunks == []
    assert list(complete.output_ids) == echo(PROMPT, 10)
    assert complete.finish_reason == "length"
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (4, 10, CACHED_TOKENS)
    assert not complete.HasField("output_logprobs")
    assert complete.WhichOneof("matched_stop") is None
    await served.idle()


async def test_chunks_joined_are_the_output_and_count_up(served: Served) -> None:
    chunks, complete = await answers(stub(served).Generate(asked(*PROMPT, max_tokens=100, stream=True)))
    assert len(chunks) > 1
    assert [token for chunk in chunks for token in chunk.token_ids] == echo(PROMPT, 100) == list(complete.output_ids)
    counted = 0
    for chunk in chunks:
        counted += len(chunk.token_ids)
        assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens) == (4, counted, CACHED_TOKENS)
    await served.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked_for", [0, 1, 3, 128])
async def test_log_probabilities_of_the_chosen_tokens(served: Served, *, stream: bool, asked_for: int) -> None:
    call = stub(served).Generate(asked(*PROMPT, max_tokens=6, logprobs=asked_for, stream=stream))
    chunks, complete = await answers(call)
    wanted = [logprob(i) for i in range(6)]
    parts = [chunk.output_logprobs for chunk in chunks] if stream else [complete.output_logprobs]
    assert [value for part in parts for value in part.token_logprobs] == wanted
    assert [token for part in parts for token in part.token_ids] == echo(PROMPT, 6)
    top = [(list(each.token_ids), list(each.values)) for part in parts for each in part.top_logprobs]
    likeliest = [
        ([token + place for place in range(asked_for)], [value - place for place in range(asked_for)])
        for token, value in zip(echo(PROMPT, 6), wanted, strict=True)
    ]
    assert top == (likeliest if asked_for else [([], [])] * 6)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_outputs_has_its_index(served: Served, *, stream: bool) -> None:
    messages = await rest(stub(served).Generate(asked(*PROMPT, n=3, max_tokens=6, stream=stream, seed=5)))
    ends = {message.complete.index: message.complete for message in messages if message.HasField("complete")}
    assert sorted(ends) == [0, 1, 2]
    for index, end in ends.items():
        first = choice_seed(5, index) if index else 0
        assert list(end.output_ids) == [PROMPT[(first + i) % len(PROMPT)] for i in range(6)]
        chunks = [message.chunk for message in messages if message.HasField("chunk") and message.chunk.index == index]
        assert [token for chunk in chunks for token in chunk.token_ids] == (list(end.output_ids) if stream else [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked_for", "count"), [(0, 3), (1, 3), (4, 3), (2, 0)])
async def test_log_probabilities_of_the_prompt(served: Served, *, stream: bool, asked_for: int, count: int) -> None:
    request = asked(*PROMPT, max_tokens=count, prompt_logprobs=asked_for, stream=stream)
    chunks, complete = await answers(stub(served).Generate(request))
    assert [chunk.HasField("input_logprobs") for chunk in chunks] == [i == 0 for i in range(len(chunks))]
    assert len(complete.output_ids) == count
    for told in [complete.input_logprobs, *(chunk.input_logprobs for chunk in chunks[:1])]:
        assert list(told.token_ids) == PROMPT
        first, *others = told.token_logprobs
        assert not first.HasField("value")
        assert [each.value for each in others] == [logprob(i) - 2 for i in range(1, 4)]
        tops = [(list(top.token_ids), list(top.values)) for top in told.top_logprobs]
        assert tops[0] == ([], [])
        assert tops[2] == ([42 + i for i in range(asked_for)], [logprob(2) - 2 - i for i in range(asked_for)])


async def test_text_is_tokenised_as_generate_does_it(served: Served) -> None:
    request = asked(max_tokens=3)
    request.text = "The fox"
    _, complete = await answers(stub(served).Generate(request))
    ids = byte_level().encode("The fox").ids
    assert complete.prompt_tokens == len(ids)
    assert list(complete.output_ids) == echo(ids, 3)


async def test_eos_ends_and_is_no_stop_of_the_callers(served: Served) -> None:
    _, complete = await answers(stub(served).Generate(asked(40, EOS_ID, 41, ignore_eos=False)))
    assert list(complete.output_ids) == [40, EOS_ID]
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", None)


async def test_a_stop_id_ends_and_is_told(served: Served) -> None:
    _, complete = await answers(stub(served).Generate(asked(*PROMPT, stop_token_ids=[42, 43])))
    assert list(complete.output_ids) == [40, 41, 42]
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 42)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_at_the_token_that_completes_it_also_across_tokens(*, stream: bool) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("The quick fox").ids
    pieces = [tokenizer.decode([token]) for token in ids]
    assert "".join(pieces) == "The quick fox"
    stop = pieces[2][-1] + pieces[3] + pieces[4][0]  # ends within the fifth token
    async with serving(script={"step_s": 0.005}) as served:
        call = stub(served).Generate(asked(*ids, max_tokens=500, stop=["nowhere", stop], stream=stream))
        chunks, complete = await answers(call)
        assert list(complete.output_ids) == ids[:5]
        assert (complete.completion_tokens, complete.finish_reason) == (5, "stop")
        assert complete.matched_stop_str == stop
        if stream:
            assert [token for chunk in chunks for token in chunk.token_ids] == ids[:5]
            assert chunks[-1].completion_tokens == 5
        await served.idle()
        assert (await statistics(served)).generated_tokens < 200, "the worker was told"


async def test_an_output_that_has_no_stop_string_ends_as_ever(served: Served) -> None:
    _, complete = await answers(stub(served).Generate(asked(*PROMPT, stop=["never"], max_tokens=5)))
    assert (list(complete.output_ids), complete.finish_reason) == (echo(PROMPT, 5), "length")


async def test_abort_ends_the_stream_with_abort_and_of_others_nothing_is_said() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        call = stub(served).Generate(asked(*PROMPT, max_tokens=900, stream=True, request_id="mine"))
        await call.read()
        await stub(served).Abort(_pb.AbortRequest(request_ids=["mine", "nobody"]))
        _, complete = await answers(call)
        assert complete.finish_reason == "abort"
        assert list(complete.output_ids) == echo(PROMPT, complete.completion_tokens)
        assert 0 < complete.completion_tokens < 900
        await served.idle()


async def test_abort_of_too_many_is_refused(served: Served) -> None:
    refused = await refusal(stub(served).Abort(_pb.AbortRequest(request_ids=["a"] * 4097)))
    assert (refused.reason, refused.fields) == ("INVALID_VALUE", ("request_ids",))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_ends_its_request(*, stream: bool) -> None:
    async with serving(script={"step_s": 0.01}) as served:
        call = stub(served).Generate(asked(*PROMPT, max_tokens=900, stream=stream))
        await eventually(lambda: any(each.started for each in served.core.registry._live.values()))
        call.cancel()
        await served.idle()


async def test_a_failure_is_a_status_also_after_chunks(served: Served) -> None:
    refused = await refusal(stub(served).Generate(asked(ERROR_TOKEN, 5, stream=True)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "NUMERICAL_ERROR")


async def test_a_service_that_ends_is_unavailable_so_that_a_gateway_tries_another() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        live = stub(served).Generate(asked(*PROMPT, max_tokens=30, stream=True))
        await live.read()
        served.signals.first.set()
        await eventually(lambda: not served.core.main_health.serving)
        refused = await refusal(stub(served).Generate(asked(*PROMPT)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert refused.retry_s is not None
        assert not (await stub(served).HealthCheck(_pb.HealthCheckRequest())).healthy
        assert (await answers(live))[1].finish_reason == "length"


async def test_model_server_and_load() -> None:
    config = {"do_sample": True, "temperature": 0.5, "top_p": 0.25}
    async with serving(script={"generation_config": config, "step_s": 0.01, "max_running": 1}) as served:
        model = await stub(served).GetModelInfo(_pb.GetModelInfoRequest())
        assert (model.served_model_name, model.is_generation, list(model.architectures)) == (
            "fake",
            True,
            ["FakeForCausalLM"],
        )
        assert (model.max_context_length, model.max_req_input_len) == (CONTEXT_LEN, CACHE_LEN)
        assert list(model.eos_token_ids) == [EOS_ID]
        filled = json.loads(model.default_sampling_params_json)
        assert filled == {"temperature": 0.5, "top_k": 50, "top_p": 0.25, "min_p": 0.0}
        assert (await stub(served).HealthCheck(_pb.HealthCheckRequest())).healthy
        call = stub(served).Generate(asked(*PROMPT, max_tokens=900, stream=True))
        await call.read()
        await eventually(lambda: any(each.started for each in served.core.registry._live.values()))
        queued = stub(served).Generate(asked(*range(40, 51)))
        await eventually(lambda: served.status.requests_waiting == 1)
        server = await stub(served).GetServerInfo(_pb.GetServerInfoRequest())
        assert (server.active_requests, server.is_paused, server.server_type) == (2, False, "chairlift")
        assert (server.data_parallel_size, server.block_size) == (1, 16)
        loads = await stub(served).GetLoads(_pb.GetLoadsRequest(include=["core", "memory"]))
        (load,) = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
        assert (load.max_total_num_tokens, load.num_waiting_uncached_tokens) == (CACHE_LEN, 11)
        call.cancel()
        await answers(queued)
        await served.idle()


async def test_the_tokenizer_comes_in_pieces_and_is_the_models(served: Served, tmp_path: Path) -> None:
    chunks = await rest(stub(served).GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == ["tokenizer.json"]
        assert json.loads(archive.read("tokenizer.json")) == json.loads(byte_level().to_str())


def test_a_bundle_has_the_tokenizers_files_alone_and_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    folder = smollm2(tmp_path)
    (folder / "model.safetensors").write_bytes(b"weights")
    data = pack(folder)
    assert len(data) > CHUNK_BYTES
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    (folder / "tokenizer.json").touch()
    assert pack(folder) == data


async def test_what_is_not_offered_is_unimplemented(served: Served) -> None:
    engine = stub(served)
    for call in (
        engine.Embed(_pb.EmbedRequest()),
        engine.FlushCache(common_pb2.FlushCacheRequest()),
        engine.StartProfile(common_pb2.StartProfileRequest()),
        engine.StopProfile(common_pb2.StopProfileRequest()),
        engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await (rest(call) if hasattr(call, "read") else call)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_named_methods_are_those_of_the_protocol() -> None:
    service = _pb.DESCRIPTOR.services_by_name["VllmEngine"]
    assert service.full_name == gateway.SERVICE_NAME
    assert set(gateway.METHOD_NAMES) == {method.name for method in service.methods}


async def test_off_means_that_there_is_no_such_service() -> None:
    async with serving(gateway="off") as served:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub(served).HealthCheck(_pb.HealthCheckRequest())
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await rest(served.generation.Generate(generate(5)))


@pytest.mark.parametrize("installed", [False, True])
def test_auto_is_on_where_the_package_is_installed(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    monkeypatch.setattr(gateway, "is_installed", lambda: installed)
    assert gateway.answers_gateways("auto") is installed
    assert gateway.answers_gateways("on")
    assert not gateway.answers_gateways("off")


def test_on_without_the_package_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"^gateway = on \(from --gateway\): .* extra chairlift\[gateway\]$"):
        load(["--model", "demo", "--gateway", "on"], {})
    assert load(["--model", "demo"], {}).service.gateway == "auto"
