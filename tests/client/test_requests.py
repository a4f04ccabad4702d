from __future__ import annotations

import pytest
import torch
from chairlift.v1 import request_pb2
from chairlift_client import _requests
from chairlift_client._requests import GenerateOptions, generation_request
from google.protobuf import text_format


def parsed(text: str) -> request_pb2.GenerationRequest:
    return text_format.Parse(text, request_pb2.GenerationRequest())


def test_every_option_lands_in_its_own_field() -> None:
    request = generation_request(
        [1, 2],
        {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "top_k": 40,
            "top_p": 0.25,
            "min_p": 0.125,
            "seed": 2**64 - 1,
            "stop_token_ids": (5, 6),
            "ignore_eos": True,
            "logprobs": 1,
            "request_id": "mine",
            "session": "ours",
            "priority": -3,
            "return_text": False,
            "return_token_ids": True,
            "skip_special_tokens": False,
        },
    )
    assert request == parsed("""
        request_id: "mine" session: "ours" priority: -3 token_ids { ids: 1 ids: 2 }
        sampling { temperature: 0.5 top_k: 40 top_p: 0.25 min_p: 0.125 }
        seed: 18446744073709551615 max_new_tokens: 7
        stop { token_ids: 5 token_ids: 6 ignore_eos: true }
        logprobs { top_n: 1 }
        output { text: false token_ids: true skip_special_tokens: false }
    """)


def test_penalties_biases_and_bans_land_in_their_fields() -> None:
    request = generation_request(
        "hi",
        {
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "no_repeat_ngram_size": 3,
            "logit_bias": {7: -100, 8: 0.5},
            "allowed_token_ids": range(2),
            "banned_token_ids": torch.tensor([4, 5]),
            "banned_words": ["no", "never"],
            "banned_sequences": [(1, 2), torch.tensor([3])],
            "min_new_tokens": 2,
            "logprobs": 5,
            "logprob_source": "raw",
        },
    )
    assert request == parsed("""
        text: "hi"
        sampling {
          repetition_penalty: 1.5 presence_penalty: -0.5 frequency_penalty: 0.25 no_repeat_ngram_size: 3
          logit_bias { key: 7 value: -100 } logit_bias { key: 8 value: 0.5 }
          allowed_token_ids: 0 allowed_token_ids: 1 banned_token_ids: 4 banned_token_ids: 5
          banned_words: "no" banned_words: "never"
          banned_sequences { ids: 1 ids: 2 } banned_sequences { ids: 3 }
        }
        stop { min_new_tokens: 2 }
        logprobs { top_n: 5 source: LOGPROB_SOURCE_RAW }
    """)
    assert list(generation_request("hi", {"banned_words": "no"}).sampling.banned_words) == ["no"]


def test_what_is_left_out_or_none_is_unset() -> None:
    assert generation_request("hi", {}) == parsed('text: "hi"')
    every_none = GenerateOptions(**dict.fromkeys(GenerateOptions.__annotations__))
    assert generation_request("hi", every_none) == parsed('text: "hi"')


def test_zeros_are_sent_as_zeros() -> None:
    request = generation_request("hi", {"temperature": 0, "top_k": 0, "max_new_tokens": 0, "seed": 0, "logprobs": 0})
    assert request == parsed(
        'text: "hi" sampling { temperature: 0 top_k: 0 } seed: 0 max_new_tokens: 0 logprobs { top_n: 0 }'
    )


def test_empty_prompts_are_the_services_to_refuse() -> None:
    assert generation_request([], {}).WhichOneof("input") == "token_ids"
    assert generation_request("", {}).WhichOneof("input") == "text"


def test_ids_of_tensors_and_negative_ids_are_sent_as_they_are() -> None:
    assert list(generation_request(torch.tensor([3, -1]), {}).token_ids.ids) == [3, -1]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "name"),
    [
        ("x", {"max_new_token": 1}, TypeError, "max_new_token"),
        ("x", {"max_new_tokens": -1}, ValueError, "max_new_tokens"),
        ("x", {"seed": 2**64}, ValueError, "seed"),
        ("x", {"temperature": "hot"}, TypeError, "temperature"),
        ("x", {"stop_token_ids": 5}, TypeError, "stop_token_ids"),
        ("x", {"logit_bias": [1]}, TypeError, "logit_bias"),
        ("x", {"logit_bias": {"a": 1}}, TypeError, "logit_bias"),
        ("x", {"logit_bias": {1: "much"}}, TypeError, "logit_bias"),
        ("x", {"banned_sequences": 5}, TypeError, "banned_sequences"),
        ("x", {"banned_sequences": [5]}, TypeError, "banned_sequences"),
        ("x", {"banned_words": [5]}, TypeError, "banned_words"),
        ("x", {"logprob_source": "both"}, ValueError, "logprob_source"),
        ([1.5], {}, TypeError, "prompt"),
        (b"x", {}, TypeError, "prompt"),
        ([2**63], {}, ValueError, "prompt"),
    ],
)
def test_what_no_message_can_carry_is_refused_by_name(
    prompt: object, options: dict[str, object], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=name):
        generation_request(prompt, options)


def test_every_field_of_the_api_has_an_option() -> None:
    """A field added to the API without an option here would be out of the client's reach."""
    reachable = {
        "text",
        "token_ids",
        "chat",
        "constraint",
        "sampling.logit_bias",
        "sampling.banned_sequences",
        "logprobs.source",
    }
    for table in (_requests._FIELDS, _requests._ID_LISTS, _requests._TEXT_LISTS):
        reachable |= {f"{part}.{field}" if part else field for part, field in table.values()}
    fields = set()
    for field in request_pb2.GenerationRequest.DESCRIPTOR.fields:
        if field.message_type and field.name not in {"token_ids", "chat", "constraint"}:
            fields |= {f"{field.name}.{inner.name}" for inner in field.message_type.fields}
        else:
            fields.add(field.name)
    assert fields == reachable


def test_result_requests_name_one_thing() -> None:
    request = _requests.result_request(request_id="a", session=None, from_index=3)
    assert (request.request_id, request.from_index) == ("a", 3)
    assert _requests.result_request(request_id=None, session="s", from_index=0).session == "s"
    for wrong in ({"request_id": None, "session": None}, {"request_id": "a", "session": "s"}):
        with pytest.raises(ValueError, match="either"):
            _requests.result_request(**wrong, from_index=0)
    with pytest.raises(ValueError, match="from_index"):
        _requests.result_request(request_id=None, session="s", from_index=1)
    with pytest.raises(ValueError, match="name request ids"):
        _requests.cancel_request(request_ids=(), session=None)
