"""VllmEngine: what a gateway asks becomes a request of the service's own, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from chairlift.v1 import request_pb2
from chairlift_service.servicers.vllm_engine.asked import asked_of
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2
from support.fake_worker import CACHE_LEN, CONTEXT_LEN
from support.served import Served, refusal, rest, serving
from support.validation import MODEL
from support.vllm_engine import PROMPT, answers, asked, stub

_pb = vllm_engine_pb2


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


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
