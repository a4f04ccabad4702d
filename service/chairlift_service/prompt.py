"""From what a caller wants continued (text, ids, a conversation) to the prompt's ids."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Final

from chairlift.v1 import chat_pb2, request_pb2
from chairlift_worker.ipc.messages import ModelCardMsg

from chairlift_service.conversation import conversation
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.faults import Faults
from chairlift_service.text.chat import ChatPrompts
from chairlift_service.text.rendering import TemplateError
from chairlift_service.text.tokenizer import Tokenizer

MAX_BAD_IDS: Final = 16  # offending ids named in one refusal
LONG_CHAT_BYTES: Final = 64 * 1024


async def prompt_ids(
    request: request_pb2.GenerationRequest,
    *,
    path: str,
    model: ModelCardMsg,
    tokenizer: Tokenizer,
    chat: ChatPrompts | None,
    faults: Faults,
) -> array[int]:
    """The ids; empty where a fault was found. Raises ServiceError as `validate`."""
    which = request.WhichOneof("input")
    where = f"{path}.{which}" if which else path
    ids: Sequence[int] | None
    if which is None:
        faults.add(path, "one of text, token_ids and chat must be set", Reason.MISSING_INPUT)
        ids = None
    elif which == "token_ids":
        ids = request.token_ids.ids
    elif which == "text":
        good = _may_fit(request.text, path=where, model=model, tokenizer=tokenizer, faults=faults)
        ids = await _encode(request.text, path=where, tokenizer=tokenizer, faults=faults) if good else None
    else:
        made = await chat_prompt(request.chat, path=where, model=model, tokenizer=tokenizer, chat=chat, faults=faults)
        ids = made[1] if made is not None else None
    if ids is None or not _fits(ids, path=where, model=model, faults=faults):
        return array("i")
    if which == "token_ids":
        known = check_ids(ids, path=f"{where}.ids", size=model.vocab_size, faults=faults)
    else:
        known = max(ids) < model.vocab_size
        if not known:
            text = f"has token {max(ids)}, which the model lacks: it has {model.vocab_size}"
            faults.add(where, text, Reason.UNKNOWN_TOKEN_ID)
    return array("i", ids) if known else array("i")


async def _encode(text: str, *, path: str, tokenizer: Tokenizer, faults: Faults) -> list[int] | None:
    try:
        return await tokenizer.encode_async(text, add_special_tokens=True)
    except ValueError as error:
        faults.add(path, str(error))
        return None


async def chat_prompt(
    message: chat_pb2.Chat,
    *,
    path: str,
    model: ModelCardMsg,
    tokenizer: Tokenizer,
    chat: ChatPrompts | None,
    faults: Faults,
) -> tuple[str, list[int]] | None:
    """The text and the ids of a conversation; None where a fault was found. Raises ServiceError as `validate`."""
    if chat is None:
        raise ServiceError(Reason.NO_CHAT_TEMPLATE, f"{path}: the model {model.name} has no chat template")
    # A long one in a thread: to parse megabytes of JSON takes a second.
    if message.ByteSize() > LONG_CHAT_BYTES:
        asked = await asyncio.to_thread(conversation, message, path=path, templates=chat.templates, faults=faults)
    else:
        asked = conversation(message, path=path, templates=chat.templates, faults=faults)
    if asked is None:
        return None
    try:
        rendered = await chat.render(asked)
        if not _may_fit(rendered.text, path=path, model=model, tokenizer=tokenizer, faults=faults):
            return None
        return rendered.text, await chat.encode(rendered)
    except TemplateError as error:
        faults.add(path, str(error), Reason.TEMPLATE_ERROR)
        return None


def check_token_ids(ids: Sequence[int], *, path: str, size: int, start: int = 0) -> None:
    """Refuses ids outside [0, size): ServiceError UNKNOWN_TOKEN_ID with a violation `path[i]` for the first of them.

    `start` is the index of the first of these ids.
    """
    faults = Faults()
    check_ids(ids, path=path, size=size, faults=faults, start=start)
    faults.raise_any()


def check_ids(ids: Sequence[int], *, path: str, size: int, faults: Faults, start: int = 0) -> bool:
    """Whether all of `ids` are in [0, size); names the first offenders with their index."""
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return True
    bad = 0
    for index, token_id in enumerate(ids, start):
        if not 0 <= token_id < size:
            bad += 1
            if bad <= MAX_BAD_IDS:
                text = f"token id {token_id} is outside the vocabulary, [0, {size})"
                faults.add(f"{path}[{index}]", text, Reason.UNKNOWN_TOKEN_ID)
    faults.metadata["vocab_size"] = str(size)
    return False


def _may_fit(text: str, *, path: str, model: ModelCardMsg, tokenizer: Tokenizer, faults: Faults) -> bool:
    """Before it is tokenised: a text that cannot fit must cost nothing."""
    num_bytes, most = len(text.encode()), tokenizer.max_text_bytes(model.context_len)
    if num_bytes <= most:
        return True
    faults.metadata |= {"context_len": str(model.context_len), "max_text_bytes": str(most)}
    why = f"has {num_bytes} bytes; at most {most} can fit the context of {model.context_len} tokens"
    faults.add(path, why, Reason.PROMPT_TOO_LONG)
    return False


def _fits(ids: Sequence[int], *, path: str, model: ModelCardMsg, faults: Faults) -> bool:
    num = len(ids)
    if num == 0:
        faults.add(path, "has no tokens; a prompt needs at least one", Reason.EMPTY_PROMPT)
        return False
    if num + 1 <= model.context_len and num <= model.cache_len:
        return True
    faults.metadata |= {
        "prompt_tokens": str(num),
        "context_len": str(model.context_len),
        "cache_len": str(model.cache_len),
    }
    if num + 1 > model.context_len:
        why = f"and one generated token exceed the context of {model.context_len}"
    else:
        why = f"exceed the key-value cache of {model.cache_len}"
    faults.add(path, f"{num} prompt tokens {why}", Reason.PROMPT_TOO_LONG)
    return False
