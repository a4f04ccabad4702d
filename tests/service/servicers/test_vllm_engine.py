"""VllmEngine: what a gateway asks becomes a request of the service's own, or is refused by name."""

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
from chairlift.v1 import info_service_pb2, request_pb2
from chairlift_service import gateway
from chairlift_service.config import ConfigError, load
from chairlift_service.sampling import choice_seed
from chairlift_service.servicers.vllm_engine.asked import asked_of
from chairlift_service.servicers.vllm_engine.bundle import CHUNK_BYTES, pack
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from support.fake_worker import CACHE_LEN, CACHED_TOKENS, CONTEXT_LEN, EOS_ID, ERROR_TOKEN, logprob
from support.served import Served, echo, eventually, generate, refusal, rest, serving
from support.tokenizer_files import byte_level, smollm2
from support.validation import MODEL

PROMPT = [40, 41, 42, 43]
_pb = vllm_engine_pb2


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


def stub(served: Served) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


async def statistics(served: Served) -> Any:
    return (await served.info.GetServer(info_service_pb2.GetServerRequest())).statistics


def asked(*ids: int, stream: bool = False, request_id: str = "", **sampling: Any) -> Any:
    """As the gateway sends it where its caller says little."""
    sampling = {"max_tokens": 8, "ignore_eos": True, "n": 1, "repetition_penalty": 1.0, "top_p": 1.0} | sampling
    sampling = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "temperature": 0.0} | sampling
    return _pb.GenerateRequest(
        request_id=request_id,
        tokenized=_pb.TokenizedInput(original_text="not looked at", input_ids=ids),
        sampling_params=_pb.SamplingParams(**sampling),
        stream=stream,
    )


async def answers(call: Any) -> tuple[list[Any], Any]:
    """(chunks, the ending), which must be the last message."""
    messages = await rest(call)
    kinds = [message.WhichOneof("response") for message in messages]
    assert kinds == ["chunk"] * (len(kinds) - 1) + ["complete"]
    return [message.chunk for message in messages[:-1]], messages[-1].complete


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


def test_penalties_biases_and_minimum_are_asked_for_by_our_own_names() -> None:
    params = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25, "min_tokens": 3}
    message = asked_of(asked(5, **params, logit_bias={7: -1.5}, logprobs=4), MODEL).message
    own = message.sampling
    assert (own.repetition_penalty, own.presence_penalty, own.frequency_penalty) == (1.5, -0.5, 0.25)
    assert (dict(own.logit_bias), message.stop.min_new_tokens, message.logprobs.top_n) == ({7: -1.5}, 3, 4)
    unset = asked_of(asked(5), MODEL).message
    for name in ("presence_penalty", "frequency_penalty"):
        assert not unset.sampling.HasField(name), "zero is unset"
    assert unset.sampling.repetition_penalty == 1, "as the gateway says"
    assert not asked_of(asked(5, repetition_penalty=0), MODEL).message.sampling.HasField("repetition_penalty")
    assert not unset.stop.HasField("min_new_tokens")


def set_value(message: Any, field: FieldDescriptor) -> None:
    """Gives a field a value that asks for something."""
    if field.is_repeated:
        if field.message_type is None:
            getattr(message, field.name).append("a" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 2)
        elif field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[5] = 1.5
        else:
            getattr(message, field.name).add()
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        setattr(message, field.name, "a")
    else:
        setattr(message, field.name, True if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else 2)


TEXT_ONLY = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
HONOURED = {"temperature", "max_tokens", "ignore_eos", "stop", "stop_token_ids", "top_k", "seed"} | TEXT_ONLY
HONOURED |= {"regex", "grammar_from_first_token", "json_object", "choice"}
HONOURED |= {"n", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias"}
IN_RANGE = {"top_p": 0.5, "min_p": 0.5, "logprobs": 1, "prompt_logprobs": 1}
# Their values must make sense; see below.
FORMS = {"json_schema", "grammar", "structural_tag"}


@pytest.mark.parametrize("name", sorted(_pb.SamplingParams.DESCRIPTOR.fields_by_name))
async def test_every_sampling_parameter_is_honoured_or_refused_by_name(served: Served, name: str) -> None:
    request = asked(*PROMPT)
    if name in IN_RANGE:
        setattr(request.sampling_params, name, IN_RANGE[name])
    else:
        set_value(request.sampling_params, request.sampling_params.DESCRIPTOR.fields_by_name[name])
    if name in FORMS:
        refused = await refusal(stub(served).Generate(request))
        assert refused.reason in ("INVALID_VALUE", "UNSUPPORTED_OPTION")
        assert refused.fields == (f"sampling_params.{name}",)
        return
    if name == "choice":
        request.sampling_params.choice.choices.append("a")
    if name in HONOURED | IN_RANGE.keys():
        assert (await rest(stub(served).Generate(request)))[-1].HasField("complete")
        return
    refused = await refusal(stub(served).Generate(request))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_OPTION")
    assert refused.fields == (f"sampling_params.{name}",)
    assert refused.initial_metadata == ()
    await served.idle()


TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"json_schema": '{"type": "integer"}'}, {"json_schema": '{"type": "integer"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"choice": {"choices": ["a", "b"]}}, {"choices": {"texts": ["a", "b"]}}),
        (
            {"structural_tag": json.dumps(TAGS)},
            {
                "tagged_text": {
                    "tags": [{"begin": "<f>", "trigger": "<f", "json_schema": '{"type": "null"}', "end": "</f>"}]
                }
            },
        ),
    ],
)
async def test_constraints_are_the_services_own(served: Served, fields: dict[str, Any], form: dict[str, Any]) -> None:
    request = asked(*PROMPT, **fields)
    assert asked_of(request, MODEL).message.constraint == request_pb2.Constraint(**form)
    await answers(stub(served).Generate(request))


@pytest.mark.parametrize("name", sorted(_pb.GenerateRequest.DESCRIPTOR.fields_by_name))
async def test_every_field_of_a_request_is_honoured_or_refused_by_name(served: Served, name: str) -> None:
    request = asked(*PROMPT)
    if name not in ("tokenized", "sampling_params"):
        set_value(request, request.DESCRIPTOR.fields_by_name[name])
    if name in ("request_id", "tokenized", "text", "sampling_params", "stream"):
        await answers(stub(served).Generate(request))
        return
    refused = await refusal(stub(served).Generate(request))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_OPTION")
    assert refused.fields == (name,)


async def test_the_only_rank_may_be_named(served: Served) -> None:
    request = asked(*PROMPT)
    request.data_parallel_rank = 0
    await answers(stub(served).Generate(request))


@pytest.mark.parametrize("part", ["", "sampling_params", "tokenized"])
async def test_a_field_of_a_newer_protocol_is_refused(served: Served, part: str) -> None:
    request = asked(*PROMPT)
    (getattr(request, part) if part else request).MergeFromString(b"\xf8\x07\x01")  # field 127, varint 1
    refused = await refusal(stub(served).Generate(request))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_OPTION")
    assert refused.fields == ("GenerateRequest",)


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (asked(), "EMPTY_PROMPT", "tokenized.input_ids"),
        (asked(*[5] * CACHE_LEN, 5), "PROMPT_TOO_LONG", "tokenized.input_ids"),
        (asked(*[5] * (CONTEXT_LEN + 1)), "PROMPT_TOO_LONG", "tokenized.input_ids"),
        (asked(5, stop_token_ids=[5] * 513), "INVALID_VALUE", "sampling_params.stop_token_ids"),
        (asked(5, 6, 7000), "UNKNOWN_TOKEN_ID", "tokenized.input_ids[2]"),
        (asked(5, stop_token_ids=[6, 7000]), "UNKNOWN_TOKEN_ID", "sampling_params.stop_token_ids[1]"),
        (asked(5, temperature=-1), "INVALID_VALUE", "sampling_params.temperature"),
        (asked(5, top_p=1.5), "INVALID_VALUE", "sampling_params.top_p"),
        (asked(5, max_tokens=0), "INVALID_VALUE", "sampling_params.max_tokens"),
        (asked(5, logprobs=129), "INVALID_VALUE", "sampling_params.logprobs"),
        (asked(5, repetition_penalty=-1), "INVALID_VALUE", "sampling_params.repetition_penalty"),
        (asked(5, presence_penalty=2.5), "INVALID_VALUE", "sampling_params.presence_penalty"),
        (asked(5, logit_bias={7000: 1}), "UNKNOWN_TOKEN_ID", "sampling_params.logit_bias[7000]"),
        (asked(5, max_tokens=3, min_tokens=4), "INVALID_VALUE", "sampling_params.min_tokens"),
        (asked(5, logprobs=-1), "UNSUPPORTED_OPTION", "sampling_params.logprobs"),
        (asked(5, prompt_logprobs=-1), "UNSUPPORTED_OPTION", "sampling_params.prompt_logprobs"),
        (asked(5, prompt_logprobs=129), "INVALID_VALUE", "sampling_params.prompt_logprobs"),
        (asked(5, n=129), "INVALID_VALUE", "sampling_params.n"),
        (asked(5, regex="(a"), "INVALID_VALUE", "sampling_params.regex"),
        (asked(5, choice={"choices": []}), "INVALID_VALUE", "sampling_params.choice.choices"),
        (asked(5, choice={"choices": ["a", ""]}), "INVALID_VALUE", "sampling_params.choice.choices[1]"),
        (asked(5, json_object=False), "INVALID_VALUE", "sampling_params.json_object"),
        (asked(5, structural_tag="{}"), "UNSUPPORTED_OPTION", "sampling_params.structural_tag"),
        (asked(5, seed=-1), "INVALID_VALUE", "sampling_params.seed"),
        (asked(5, stop=["a", ""]), "INVALID_VALUE", "sampling_params.stop[1]"),
        (asked(5, stop=["a"] * 65), "INVALID_VALUE", "sampling_params.stop"),
        (asked(5, request_id="a\nb"), "INVALID_VALUE", "request_id"),
        (_pb.GenerateRequest(), "MISSING_INPUT", "input"),
    ],
)
async def test_refusals_name_the_gateways_own_fields(served: Served, request_: Any, reason: str, field: str) -> None:
    refused = await refusal(stub(served).Generate(request_))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.reason, refused.fields) == (reason, (field,))
    assert refused.message.startswith(f"{field}: ")
    assert refused.initial_metadata == ()
    await served.idle()


def sampling_of(served: Served) -> Any:
    """What the one live request was made of."""
    (generation,) = served.core.registry._live.values()
    return generation.request.sampling


@pytest.mark.parametrize(
    ("config", "sampling", "wanted"),
    [
        # A temperature says all of it: zeros are off.
        ({}, {"temperature": 0.5, "top_p": 0.0}, (0.5, 0, 1.0, 0.0)),
        ({"do_sample": True, "top_k": 9, "top_p": 0.5}, {"temperature": 0.5, "top_p": 1.0}, (0.5, 0, 1.0, 0.0)),
        ({}, {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125}, (0.5, 7, 0.25, 0.125)),
        ({}, {"temperature": 0.0, "top_p": 0.25}, (0.0, 0, 1.0, 0.0)),
        # Without one the model's own hold, and the service's rule for filters.
        ({}, {"temperature": None, "top_p": 0.0}, (0.0, 0, 1.0, 0.0)),
        ({"do_sample": True, "top_k": 9}, {"temperature": None, "top_p": 0.0}, (1.0, 9, 1.0, 0.0)),
        ({"do_sample": True, "temperature": 0.75}, {"temperature": None, "top_p": 0.5}, (0.75, 50, 0.5, 0.0)),
    ],
)
async def test_zeros_mean_unset(config: dict[str, Any], sampling: dict[str, Any], wanted: tuple[float, ...]) -> None:
    async with serving(script={"generation_config": config, "step_s": 0.02}) as served:
        call = stub(served).Generate(asked(*PROMPT, max_tokens=500, seed=3, stream=True, **sampling))
        await call.read()
        got = sampling_of(served)
        assert (got.temperature, got.top_k, got.top_p, got.min_p, got.seed) == (*wanted, 3)
        call.cancel()
        await served.idle()


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
