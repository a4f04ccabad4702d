"""Joined pieces against the library's decode of the whole: decode(prompt + output) minus decode(prompt)."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from chairlift_service.text.detokenizer import Detokenizer
from chairlift_service.text.tokenizer import Tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import tokenizer_files as made
from support.whole_text import BUILDERS, cases, minus_prompt, pair

FAMILY = "👨\u200d👩\u200d👧\u200d👦"
TEXTS = [
    f"{FAMILY} and 🏳️\u200d🌈",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "東京は日本の首都です。 안녕하세요",
    "  leading, and   inner spaces\n\n\tand a tab ",
    "the fox, the foxes! don't",
]


def pieces(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True, interval: int = 1
) -> list[str]:
    detokenizer = Detokenizer(tokenizer=tokenizer, prompt_ids=prompt, skip_special_tokens=skip)
    parts = [detokenizer.push_all(output[i : i + interval]) for i in range(0, len(output), interval)]
    parts.append(detokenizer.finish())
    assert detokenizer.finish() == "", "the tail is told once"
    return parts


@given(cases())
@example((made.byte_fallback, [35], [131], False, 1))  # a space, which has no text at the beginning, and no UTF-8
@example((made.byte_fallback, [35, 36], [131], False, 1))
@example((made.byte_fallback, [36], [131], False, 1))
@settings(max_examples=700, deadline=None)
def test_joined_pieces_are_the_whole_decode_minus_the_prompts(case) -> None:
    build, prompt, output, skip, interval = case
    tokenizer, library = pair(build)
    joined = "".join(pieces(tokenizer, prompt, output, skip=skip, interval=interval))
    assert joined == minus_prompt(library, prompt, output, skip=skip)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_smollm2s_own_tokens_join_to_the_whole_decode(smollm2_folder: Path, data: st.DataObject) -> None:
    tokenizer, library = smollm2_pair(smollm2_folder)
    broken = [i for i in range(tokenizer.size) if "\ufffd" in library.decode([i])]
    assert len(broken) > 100, "bytes that are no characters of their own are what this test is about"
    ids = st.lists(
        st.one_of(st.integers(0, tokenizer.size - 1), st.sampled_from(broken), st.integers(0, 20)), max_size=60
    )
    prompt, output, skip = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    for interval in (1, 3, 8):
        joined = "".join(pieces(tokenizer, prompt, output, skip=skip, interval=interval))
        assert joined == minus_prompt(library, prompt, output, skip=skip)


@functools.cache
def smollm2_pair(folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@functools.cache
def broken_ids(folder: Path) -> list[int]:
    """Tokens whose bytes are no characters of their own."""
    tokenizer, library = smollm2_pair(folder)
    found = [i for i in range(tokenizer.size) if "\ufffd" in library.decode([i])]
    assert len(found) > 100
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_text_given_one_id_at_a_time_comes_out_as_it_went_in(smollm2_folder: Path, text: str) -> None:
    tokenizer, _ = smollm2_pair(smollm2_folder)
    ids = tokenizer.encode(text)
    parts = pieces(tokenizer, tokenizer.encode("A prompt:"), ids)
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


@pytest.mark.parametrize("build", [made.byte_level, made.byte_fallback, made.gemma])
@pytest.mark.parametrize("text", TEXTS)
def test_a_character_of_several_tokens_is_told_whole(build, text: str) -> None:
    tokenizer, _ = pair(build)
    ids = tokenizer.encode(" " + text, add_special_tokens=False)
    parts = pieces(tokenizer, tokenizer.encode("a"), ids)
    assert "\ufffd" not in "".join(parts)
    assert text in "".join(parts)


@pytest.mark.parametrize("build", [made.byte_level, made.byte_fallback, made.gemma])
def test_a_character_begun_by_the_prompt_is_told_when_the_output_completes_it(build) -> None:
    tokenizer, _ = pair(build)
    ids = tokenizer.encode("a🦤", add_special_tokens=False)
    for cut in range(1, 4):
        assert "".join(pieces(tokenizer, ids[:-cut], ids[-cut:])) == "🦤"


def test_a_character_that_the_output_spoils_is_told_by_the_prompt_alone() -> None:
    tokenizer, _ = pair(made.byte_level)
    ids = tokenizer.encode("a🦤", add_special_tokens=False)
    b = tokenizer.encode("b")
    assert "".join(pieces(tokenizer, ids[:-1], b)) == "b"
    assert "".join(pieces(tokenizer, ids[:-1], [])) == ""
    assert "".join(pieces(tokenizer, ids[:-2], [ids[-2], *b])) == "b"


def test_the_beginning_of_a_surrogate_stood_in_the_prompts_text_already() -> None:
    """Python's decoder waits for its third byte; the library has two U+FFFD for the two there are."""
    tokenizer, library = pair(made.byte_level)
    first, second, third = (library.token_to_id(char) for char in "íłĢ")  # bytes ED A0 80
    assert library.decode([first, second]) == "\ufffd" * 2
    for output, text in (([], ""), ([third], "\ufffd"), (tokenizer.encode("b"), "b")):
        assert "".join(pieces(tokenizer, [first, second], output)) == text


def test_valid_text_after_an_invalid_byte_is_told_at_once() -> None:
    tokenizer, library = pair(made.byte_level)
    lone = library.token_to_id("ð")  # byte 0xF0, the first of four
    assert pieces(tokenizer, [], [lone, *tokenizer.encode("b")]) == ["", "\ufffdb", ""]


def test_an_unfinished_tail_is_flushed_as_one_replacement() -> None:
    tokenizer, library = pair(made.byte_level)
    assert pieces(tokenizer, [], [library.token_to_id("ð"), library.token_to_id("Ł")]) == ["", "", "\ufffd"]


def test_one_bad_byte_spoils_its_whole_run_of_byte_tokens() -> None:
    tokenizer, library = pair(made.byte_fallback)
    run = [library.token_to_id(t) for t in ("<0xC3>", "<0xA9>", "<0xFF>")]
    assert "".join(pieces(tokenizer, [1], run)) == "\ufffd" * 3
    assert "".join(pieces(tokenizer, [1], run[:2])) == "é"


@pytest.mark.parametrize(
    ("skip", "prompt", "output", "text"),
    [
        (True, ["<s>"], ["▁the", "▁fox"], "the fox"),  # the first visible token loses its space
        (False, ["<s>"], ["▁the", "▁fox"], " the fox"),  # it is not first
        (True, ["▁a"], ["▁the", "▁fox"], " the fox"),
        (True, ["▁a"], ["</s>", "▁the"], " the"),  # after a special token
        (False, ["▁a"], ["</s>", "▁the"], "</s> the"),
        (True, ["<s>"], ["▁▁", "a"], " a"),  # of two spaces one is the output's
        (True, ["▁a"], ["▁", "▁", "a"], "  a"),
        (True, [], ["▁", "▁fox"], " fox"),
    ],
)
@pytest.mark.parametrize("interval", [1, 3, 8])
def test_leading_spaces_are_right_for_every_interval(skip, prompt, output, text, interval) -> None:
    tokenizer, library = pair(made.byte_fallback)
    ids = [[library.token_to_id(token) for token in part] for part in (prompt, output)]
    assert "".join(pieces(tokenizer, *ids, skip=skip, interval=interval)) == text


@pytest.mark.parametrize("build", BUILDERS)
def test_ids_that_name_no_token_give_no_text(build) -> None:
    tokenizer, library = pair(build)
    word = library.encode("the fox up a b", add_special_tokens=False).ids
    beyond = [tokenizer.size, tokenizer.size + 1000, 2**31 - 1]
    assert "".join(pieces(tokenizer, [*word, *beyond], [*beyond, *word, *beyond])) == minus_prompt(
        library, word, word, skip=True
    )


@pytest.mark.parametrize("build", [made.byte_level, made.byte_fallback])
def test_the_cost_of_a_token_does_not_grow_with_the_output(build) -> None:
    tokenizer, _ = pair(build)
    ids = tokenizer.encode("the fox " * 4000, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer=tokenizer, prompt_ids=ids, skip_special_tokens=True)

    def seconds(part: Sequence[int]) -> float:
        best = 1e9
        for _ in range(3):
            start = time.perf_counter()
            detokenizer.push_all(part)
            best = min(best, time.perf_counter() - start)
        return best

    first = seconds(ids[:500])
    detokenizer.push_all(ids)
    assert seconds(ids[:500]) < 5 * first + 0.01
