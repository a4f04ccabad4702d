"""Requests as the service reads them, for a model of which nothing but its card is there."""

from __future__ import annotations

import pytest
from chairlift.v1 import request_pb2
from chairlift_service.constraints import Constraints
from chairlift_service.defaults import RequestDefaults
from chairlift_service.errors import ServiceError
from chairlift_service.text.tokenizer import Tokenizer
from chairlift_service.validate import ValidRequest, validate
from chairlift_worker.ipc.messages import ModelCardMsg

from support import tokenizer_files as made

MODEL = ModelCardMsg(
    name="m",
    architecture="A",
    tokenizer_dir="",
    vocab_size=100,
    context_len=16,
    cache_len=64,
    eos_token_ids=(7, 8),
    dtype="float32",
    num_parameters=1,
    generation_config={},
)
GREEDY = RequestDefaults()
TOKENIZER = Tokenizer(backend=made.word_level())  # up 1, and 2, down 3, hop 4


async def valid(
    *,
    model: ModelCardMsg = MODEL,
    defaults: RequestDefaults = GREEDY,
    tokenizer: Tokenizer = TOKENIZER,
    path: str = "request",
    **fields: object,
) -> ValidRequest:
    if "text" not in fields and "token_ids" not in fields:
        fields["token_ids"] = {"ids": [1, 2, 3]}
    request = request_pb2.GenerationRequest(**fields)
    return await validate(
        request,
        path=path,
        model=model,
        tokenizer=tokenizer,
        chat=None,
        defaults=defaults,
        constraints=Constraints(),
    )


async def refusal(**arguments: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await valid(**arguments)
    return caught.value


def at(error: ServiceError) -> list[tuple[str, str]]:
    return [(violation.reason.name, violation.field) for violation in error.violations]
