"""What an output's text is by the tokenizers library's decode of the whole, for every style of decoder."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import tokenizers
from chairlift_service.text.tokenizer import Tokenizer
from hypothesis import strategies as st

from support import tokenizer_files as made

BUILDERS = [
    made.byte_level,
    made.byte_fallback,
    made.gemma,
    made.metaspace,
    made.word_piece,
    made.suffix_bpe,
    made.word_level,
]


@functools.cache
def pair(build: Callable[[], tokenizers.Tokenizer]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """(the one under test, the library's own)."""
    return Tokenizer(backend=build()), build()


def minus_prompt(library: tokenizers.Tokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool) -> str:
    """decode(prompt + output) minus decode(prompt), from the library's decode and plain UTF-8 rules alone.

    Where the output completes a character that the prompt began, the two texts part earlier; what the prompt's own
    bytes spell out in full stays the prompt's.
    """
    whole = library.decode([*prompt, *output], skip_special_tokens=skip)
    before = library.decode(prompt, skip_special_tokens=skip)
    if whole.startswith(before):
        return whole[len(before) :]
    visible = [library.id_to_token(i) for i in prompt]
    special = {t.content for t in library.get_added_tokens_decoder().values() if t.special}
    visible = [t for t in visible if t is not None and not (skip and t in special)]
    if visible[-1] not in made.BYTES:
        assert before[-1] == "\ufffd"  # byte-level: one for the unfinished character at the end
        assert whole.startswith(before[:-1])
        return whole[len(before) - 1 :]
    tail = b""
    while visible and visible[-1] in made.BYTES:
        tail = bytes([int(visible.pop()[3:5], 16)]) + tail
    base = max(0, len(before) - len(_fallback_text(tail)))  # a space at the very beginning has no text
    run = tail + _leading_bytes(library, output, skip=skip)
    try:
        run.decode()
    except UnicodeDecodeError:
        return whole[base + len(tail) :]
    return whole[base + len(tail.decode(errors="ignore")) :]


def first_stop(texts: list[str], stops: list[str], min_new_tokens: int = 0) -> tuple[int, int, str] | None:
    """(number of tokens, where it begins, which): `texts[n]` is the text of n tokens.

    A stop is complete with token n if it stands in the text of n tokens, and not yet in that of n - 1.
    """
    for num in range(max(1, min_new_tokens), len(texts)):
        text, before = texts[num], texts[num - 1]
        found = [
            (match.start() + len(stop), match.start(), stop)
            for stop in stops
            for match in re.finditer(f"(?={re.escape(stop)})", text)
            if before[: match.start() + len(stop)] != text[: match.start() + len(stop)]
        ]
        if found:
            return num, *min(found)[1:]
    return None


def _fallback_text(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _leading_bytes(library: tokenizers.Tokenizer, output: Sequence[int], *, skip: bool) -> bytes:
    run = b""
    for token_id in output:
        token = library.id_to_token(token_id)
        added = library.get_added_tokens_decoder().get(token_id)
        if token is None or (skip and added is not None and added.special):
            continue
        if token not in made.BYTES:
            break
        run += bytes([int(token[3:5], 16)])
    return run


@st.composite
def cases(
    draw: st.DrawFn, *, with_first: bool = False
) -> tuple[Callable[[], tokenizers.Tokenizer], list[int], list[int], bool, int]:
    build = draw(st.sampled_from(BUILDERS))
    size = pair(build)[0].size
    some_id = st.one_of(st.integers(0, size - 1), st.integers(0, min(size + 2, 20)))
    if build in (made.byte_fallback, made.gemma, made.metaspace):
        runs = [0x61, 0x20, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xE3, 0x81]
        some_id = st.one_of(some_id, st.integers(259, size - 1), st.sampled_from(runs).map(lambda byte: byte + 3))
    ids = st.lists(some_id, max_size=40)
    return build, draw(ids), draw(ids), draw(st.booleans()), draw(st.sampled_from([1, 3, 8]))
