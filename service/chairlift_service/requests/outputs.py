"""The log of a request's output, with the text that it is to have."""

from __future__ import annotations

import asyncio
from typing import Final

from chairlift_service.requests.output_log import OutputLog, TextDecoder
from chairlift_service.text.detokenizer import Detokenizer
from chairlift_service.text.stopping import StoppingText
from chairlift_service.text.stops import StopMatcher
from chairlift_service.text.tokenizer import Tokenizer
from chairlift_service.validate import ValidRequest

LONG_PROMPT: Final = 4096
"""Tokens of a prompt from which on its text is made off the event loop."""


async def output_log(request: ValidRequest, *, tokenizer: Tokenizer) -> OutputLog:
    """An empty one. With `echo` the prompt's text stands before that of the first token."""
    if not request.want_text and not request.stop_strings:
        return OutputLog(decoder=None)
    before, prompt_ids = "", request.prompt_ids
    if request.echo:  # the prompt is as good as output, so that a character that is cut at its end comes out whole
        prompt_ids = prompt_ids[:0]
    text = Detokenizer(tokenizer=tokenizer, prompt_ids=prompt_ids, skip_special_tokens=request.skip_special_tokens)
    if request.echo:
        is_long = request.num_prompt_tokens >= LONG_PROMPT
        before = (
            await asyncio.to_thread(text.push_all, request.prompt_ids) if is_long else text.push_all(request.prompt_ids)
        )
    decoder: TextDecoder = text
    if request.stop_strings:
        decoder = StoppingText(
            detokenizer=text,
            matcher=StopMatcher(stops=request.stop_strings, include=request.include_stop),
            min_new_tokens=request.min_new_tokens,
            told=request.want_text,
        )
    return OutputLog(decoder=decoder, before=before)
