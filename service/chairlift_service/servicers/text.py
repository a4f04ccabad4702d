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
from chairlift_service.text.tokenizer import Tokenizer

IDS_PER_TURN: Final = 4096
"""Ids handled before the event loop gets a turn."""

ANSWER_BYTES: Final = 16
"""Bytes of Tokenize's answer for each byte of text, at most: where each is a token of its own (`<0x0A>`), its id, its
spelling and their frame.
"""

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
        tokenizer = self._lifecycle.model().tokenizer
        self._check_size(request.text)
        add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        try:
            ids = await tokenizer.encode_async(request.text, add_special_tokens=add_special)
        except ValueError as error:
            raise from_violations([Violation("text", str(error))]) from None
        response = _pb.TokenizeResponse()
        for start in range(0, len(ids), IDS_PER_TURN):
            part = ids[start : start + IDS_PER_TURN]
            response.token_ids.extend(part)
            response.tokens.extend(tokenizer.tokens(part))
            await asyncio.sleep(0)
        return response

    @guarded
    async def Detokenize(self, request: _pb.DetokenizeRequest, context: CallContext) -> _pb.DetokenizeResponse:  # noqa: N802, ARG002 - gRPC's signature
        """Turns ids into text."""
        model = self._lifecycle.model()
        ids = await _checked_ids(request.token_ids, size=model.card.vocab_size)
        skip_special = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._decode(model.tokenizer, ids, skip_special=skip_special)
        return _pb.DetokenizeResponse(text=text)

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

    def _check_size(self, text: str) -> None:
        """Raises MESSAGE_TOO_LARGE for a text whose tokens might not fit an answer, before any work on it."""
        num_bytes = len(text.encode())
        if num_bytes > self._max_text_bytes:
            raise ServiceError(
                Reason.MESSAGE_TOO_LARGE,
                f"text: has {num_bytes} bytes; at most {self._max_text_bytes} are tokenised in one call",
                metadata={"max_text_bytes": str(self._max_text_bytes)},
            )

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


async def _checked_ids(ids: Sequence[int], *, size: int) -> list[int]:
    """The ids as a list. Raises ServiceError UNKNOWN_TOKEN_ID for the first that are outside [0, size)."""
    checked: list[int] = []
    for start in range(0, len(ids), IDS_PER_TURN):
        part = ids[start : start + IDS_PER_TURN]
        check_token_ids(part, path="token_ids", size=size, start=start)
        checked += part
        await asyncio.sleep(0)
    return checked
