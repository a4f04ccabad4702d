"""Text with an echoed prompt before it and stop strings in it, against the library's decode of the whole."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from chairlift.v1 import event_pb2
from chairlift_service.requests.output_log import OutputLog
from chairlift_service.requests.outputs import output_log
from chairlift_service.text.tokenizer import LONG_LIST, Tokenizer
from chairlift_service.validate import ValidRequest
from chairlift_worker.ipc.messages import SamplingMsg
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tokenizer_files as made
from support.whole_text import BUILDERS, cases, first_stop, minus_prompt, pair


def log_of(
    tokenizer: Tokenizer,
    prompt: list[int],
    output: list[int],
    *,
    skip: bool,
    stops: list[str],
    echo: bool = False,
    include: bool = False,
    min_new_tokens: int = 0,
) -> OutputLog:
    """The log of this output, closed; tokens behind a stop are dropped, as the dispatcher does."""
    request = ValidRequest(
        request_id="a",
        session=None,
        prompt_ids=array("i", prompt),
        max_new_tokens=99,
        limit=event_pb2.LENGTH_LIMIT_MAX_NEW_TOKENS,
        lowered_by=event_pb2.LENGTH_LIMIT_UNSPECIFIED,
        sampling=SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        stop_ids=(),
        want_text=True,
        want_ids=True,
        want_logprobs=False,
        skip_special_tokens=skip,
        stop_strings=tuple(stops),
        include_stop=include,
        min_new_tokens=min_new_tokens,
        echo=echo,
    )
    log = asyncio.run(output_log(request, tokenizer=tokenizer))
    for token_id in output:
        if log.stop is None:
            log.append(token_id, 0.0)
    log.close()
    return log


@given(case=cases(), echo=st.booleans(), include=st.booleans(), min_new_tokens=st.integers(0, 12), data=st.data())
@settings(max_examples=500, deadline=None)
def test_the_output_ends_with_the_token_that_completes_a_stop_in_its_own_text(
    case, echo: bool, include: bool, min_new_tokens: int, data: st.DataObject
) -> None:
    """Stops are pieces of the prompt's text and of the output's: the former must not be found."""
    build, prompt, output, skip, _ = case
    tokenizer, library = pair(build)
    texts = [minus_prompt(library, prompt, output[:num], skip=skip) for num in range(len(output) + 1)]
    whole = library.decode([*prompt, *output], skip_special_tokens=skip)
    stops = []
    for text in data.draw(st.lists(st.sampled_from([*texts[-3:], whole]), max_size=3)):
        start = data.draw(st.integers(0, max(0, len(text) - 1)))
        stops.append(text[start : start + data.draw(st.integers(1, 5))])
    stops = [stop for stop in stops if stop and "\ufffd" not in stop]
    num, start, stop = first_stop(texts, stops, min_new_tokens) or (len(output), len(texts[-1]), None)
    end = start + (len(stop) if include and stop else 0)
    before = library.decode([*prompt, *output[:num]], skip_special_tokens=skip).removesuffix(texts[num])
    log = log_of(
        tokenizer, prompt, output, skip=skip, stops=stops, echo=echo, include=include, min_new_tokens=min_new_tokens
    )
    assert (log.slice(0, len(log)).text, log.stop, len(log)) == (
        (before if echo else "") + texts[num][:end],
        stop,
        num,
    )


@pytest.mark.parametrize("build", BUILDERS)
def test_a_long_prompt_is_echoed_whole(build) -> None:
    tokenizer, library = pair(build)
    prompt = [3 + i % (tokenizer.size - 3) for i in range(LONG_LIST + 1)]
    log = log_of(tokenizer, prompt, [5], skip=True, stops=[], echo=True)
    assert log.slice(0, 1).text == library.decode([*prompt, 5])


def test_a_stop_that_the_prompt_ends_with_is_not_found_in_its_echo() -> None:
    """Llama's line ends are byte tokens, whose text may change until a token comes that is none."""
    tokenizer, library = pair(made.byte_fallback)
    line, fox = library.token_to_id("<0x0A>"), library.token_to_id("▁fox")
    for echo, text in ((True, "the fox\n fox"), (False, " fox")):
        prompt = [library.token_to_id("▁the"), fox, line]
        log = log_of(tokenizer, prompt, [fox, line, fox], skip=True, stops=["\n"], echo=echo)
        assert (log.slice(0, len(log)).text, log.stop, len(log)) == (text, "\n", 2)
