"""TextService."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from chairlift.v1 import text_service_pb2, text_service_pb2_grpc

from chairlift_service.errors import Reason, ServiceError, Violation, from_violations
from chairlift_service.faults import Faults
from chairlift_service.lifecycle import Lifecycle
from chairlift_service.prompt import chat_prompt, check_token_ids
from chairlift_service.servicers.edge import CallContext, guarded
from chairlift_service.text.control_tokens import Span
from chairlift_service.text.tokenizer import Tokenizer

IDS_PER_TURN: Final = 4096
"""Ids handled before the event loop gets a turn."""

ANSWER_BYTES: Final = 16
"""Bytes of Tokenize's answer for each byte of text, at most: where each is a token of its own (`<0x0A>`), its id, its
spelling and their frame. Where it stands may take as much again.
"""

MAX_BATCH: Final = 1024
"""Texts, or lists of ids, in one call."""

MAX_WAITING_LISTS: Final = 64
"""Long lists of ids that may wait to be turned into text; more are refused."""

_pb = text_service_pb2


class TextServicer(text_service_pb2_grpc.TextServiceServicer):
    """Text to tokens and back, conversations to prompts. Method names and meaning: text_service.proto."""

    def __init__(self, *, lifecycle: Lifecycle, max_message_bytes: int) -> None:
        self._lifecycle = lifecycle
        self._max_text_bytes = max_message_bytes // ANSWER_BYTES
        self._num_waiting = 0

    @guarded
    async def Tokenize(self, request: _pb.TokenizeRequest, context: CallContext) -> _pb.TokenizeResponse:  # noqa: N802, ARG002 - gRPC's signature
        """Tokenises as a plain prompt is tokenised."""
        self._check_size([request])
        return await _tokenize(self._lifecycle.model().tokenizer, request, path="text")

    @guarded
    async def BatchTokenize(self, request: _pb.BatchTokenizeRequest, context: CallContext) -> _pb.BatchTokenizeResponse:  # noqa: N802, ARG002 - gRPC's signature
        """Tokenises all texts, or none."""
        _check_count(len(request.requests))
        self._check_size(request.requests)
        tokenizer, response = self._lifecycle.model().tokenizer, _pb.BatchTokenizeResponse()
        for i, each in enumerate(request.requests):
            response.responses.append(await _tokenize(tokenizer, each, path=f"requests[{i}].text"))
        return response

    @guarded
    async def Detokenize(self, request: _pb.DetokenizeRequest, context: CallContext) -> _pb.DetokenizeResponse:  # noqa: N802, ARG002 - gRPC's signature
        """Turns ids into text."""
        return await self._detokenize(request, path="token_ids")

    @guarded
    async def BatchDetokenize(  # noqa: N802 - gRPC's name
        self,
        request: _pb.BatchDetokenizeRequest,
        context: CallContext,  # noqa: ARG002 - gRPC's signature
    ) -> _pb.BatchDetokenizeResponse:
        """Turns all lists of ids into text, or none."""
        _check_count(len(request.requests))
        response = _pb.BatchDetokenizeResponse()
        for i, each in enumerate(request.requests):
            response.responses.append(await self._detokenize(each, path=f"requests[{i}].token_ids"))
        return response

    @guarded
    async def RenderChat(self, request: _pb.RenderChatRequest, context: CallContext) -> _pb.RenderChatResponse:  # noqa: N802, ARG002 - gRPC's signature
        """Renders a conversation as a generation's input is rendered."""
        model, faults = self._lifecycle.model(), Faults()
        made = await chat_prompt(
            request.chat, path="chat", model=model.card, tokenizer=model.tokenizer, chat=model.chat, faults=faults
        )
        faults.raise_any()
        assert made is not None  # else there was a fault
        return _pb.RenderChatResponse(text=made[0], token_ids=made[1])

    def _check_size(self, requests: Sequence[_pb.TokenizeRequest]) -> None:
        """Raises MESSAGE_TOO_LARGE for texts whose tokens might not fit an answer, before any work on them."""
        num_bytes = sum(len(each.text.encode()) * (2 if each.offsets else 1) for each in requests)
        if num_bytes > self._max_text_bytes:
            raise ServiceError(
                Reason.MESSAGE_TOO_LARGE,
                f"there are {num_bytes} bytes of text, those with offsets counted twice; at most "
                f"{self._max_text_bytes} are tokenised in one call",
                metadata={"max_text_bytes": str(self._max_text_bytes)},
            )

    async def _detokenize(self, request: _pb.DetokenizeRequest, *, path: str) -> _pb.DetokenizeResponse:
        model = self._lifecycle.model()
        ids = await _checked_ids(request.token_ids, path=path, size=model.card.vocab_size)
        skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._decode(model.tokenizer, ids, skip_special=skip_special)
        return _pb.DetokenizeResponse(text=text)

    async def _decode(self, tokenizer: Tokenizer, ids: list[int], *, skip_special: bool) -> str:
        """Decodes; in a thread if the list is long."""
        if len(ids) <= IDS_PER_TURN:
            return tokenizer.decode(ids, skip_special_tokens=skip_special)
        if self._num_waiting >= MAX_WAITING_LISTS:
            raise ServiceError(Reason.QUEUE_FULL, "too many long lists of ids wait for the tokenizer")
        self._num_waiting += 1
        try:
            return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=skip_special)
        finally:
            self._num_waiting -= 1


async def _tokenize(tokenizer: Tokenizer, request: _pb.TokenizeRequest, *, path: str) -> _pb.TokenizeResponse:
    """Raises ServiceError where the tokenizer gives up on the text, or has too much to do."""
    add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    spans: list[Span] = []
    try:
        if request.offsets:
            ids, spans = await tokenizer.encode_spans(request.text, add_special_tokens=add_special)
        else:
            ids = await tokenizer.encode_async(request.text, add_special_tokens=add_special)
    except ValueError as error:
        raise from_violations([Violation(path, str(error))]) from None
    num_tokens = min(len(ids), request.max_tokens) if request.HasField("max_tokens") else len(ids)
    response = _pb.TokenizeResponse(truncated=num_tokens < len(ids))
    for start in range(0, num_tokens, IDS_PER_TURN):
        part = slice(start, min(start + IDS_PER_TURN, num_tokens))
        response.token_ids.extend(ids[part])
        response.tokens.extend(tokenizer.tokens(ids[part]))
        response.starts.extend(first for first, _ in spans[part])
        response.ends.extend(last for _, last in spans[part])
        await asyncio.sleep(0)
    return response


def _check_count(num_requests: int) -> None:
    if num_requests > MAX_BATCH:
        raise from_violations([Violation("requests", f"has {num_requests} entries, at most {MAX_BATCH}")])


async def _checked_ids(ids: Sequence[int], *, path: str, size: int) -> list[int]:
    """The ids as a list. Raises ServiceError UNKNOWN_TOKEN_ID for the first that are outside [0, size)."""
    checked: list[int] = []
    for start in range(0, len(ids), IDS_PER_TURN):
        part = ids[start : start + IDS_PER_TURN]
        check_token_ids(part, path=path, size=size, start=start)
        checked += part
        await asyncio.sleep(0)
    return checked
