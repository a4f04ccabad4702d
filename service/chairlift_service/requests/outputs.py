"""The log of a request's output, with the text that it is to have."""

from __future__ import annotations

import asyncio

from chairlift_service.requests.output_log import OutputLog
from chairlift_service.text.detokenizer import Detokenizer
from chairlift_service.text.echo import OpenEnd
from chairlift_service.text.output_text import OutputText
from chairlift_service.text.stops import StopMatcher
from chairlift_service.text.tokenizer import LONG_LIST, Tokenizer
from chairlift_service.validate import ValidRequest


async def output_log(request: ValidRequest, *, tokenizer: Tokenizer) -> OutputLog:
    """An empty one. With `echo` the prompt's text stands before that of the first token."""
    if not request.want_text and not request.stop_strings:
        return OutputLog(decoder=None)
    skip = request.skip_special_tokens
    text = Detokenizer(tokenizer=tokenizer, prompt_ids=request.prompt_ids, skip_special_tokens=skip)
    if not request.stop_strings and not request.echo:
        return OutputLog(decoder=text)
    before, open_end = "", None
    if request.echo:
        before = await _certain_text(request, tokenizer=tokenizer, num_open=text.num_open)
        if text.num_open:
            open_end = OpenEnd(
                tokenizer=tokenizer,
                prompt_ids=request.prompt_ids,
                num_open=text.num_open,
                skip_special_tokens=skip,
            )
            before += open_end.certain
    matcher = None
    if request.stop_strings:
        matcher = StopMatcher(stops=request.stop_strings, include=request.include_stop)
    decoder = OutputText(
        detokenizer=text,
        open_end=open_end,
        matcher=matcher,
        min_new_tokens=request.min_new_tokens,
        told=request.want_text,
    )
    return OutputLog(decoder=decoder, before=before)


async def _certain_text(request: ValidRequest, *, tokenizer: Tokenizer, num_open: int) -> str:
    """The prompt's text without that of its last `num_open` tokens; of a long one made in a thread."""
    ids, skip = request.prompt_ids[: request.num_prompt_tokens - num_open], request.skip_special_tokens
    if len(ids) <= LONG_LIST:
        return tokenizer.decode(ids, skip_special_tokens=skip)
    return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=skip)
