"""Byte alphabet and traits, against the tokenizers library."""

from __future__ import annotations

import json

import pytest
from chairlift_service.text.decoder import byte_level_bytes, decoder_traits, fallback_byte
from support import tokenizer_files as made
from tokenizers import decoders, pre_tokenizers


def test_every_byte_is_spelt_as_the_library_spells_it() -> None:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for char in map(chr, [*range(0x20, 0x800), 0x20AC, 0x1F680]):
        ((token, _),) = split.pre_tokenize_str(char)
        assert byte_level_bytes(token) == char.encode()
    assert {byte_level_bytes(char)[0] for char in pre_tokenizers.ByteLevel.alphabet()} == set(range(256))


@pytest.mark.parametrize("token", ["tool call", "Ġplain", "čau", "日本", "<|end|>", "a\u00ad"])
def test_added_tokens_decode_as_the_library_decodes_them(token: str) -> None:
    assert byte_level_bytes(token).decode(errors="replace") == decoders.ByteLevel().decode([token])


@pytest.mark.parametrize(
    ("token", "byte"), [("<0x00>", 0), ("<0xfF>", 255), ("<0x1>", None), ("<0xGG>", None), ("a", None)]
)
def test_byte_tokens_are_told_from_others(token: str, byte: int | None) -> None:
    assert fallback_byte(token) == byte


@pytest.mark.parametrize(
    ("build", "byte_level", "byte_fallback"),
    [(made.byte_level, True, False), (made.byte_fallback, False, True), (made.metaspace, False, False)],
)
def test_traits_follow_the_decoder(build, byte_level: bool, byte_fallback: bool) -> None:
    traits = decoder_traits(json.loads(build().to_str())["decoder"])
    assert (traits.byte_level, traits.byte_fallback) == (byte_level, byte_fallback)


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    mixed = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ValueError, match="ByteLevel, Strip"):
        decoder_traits(json.loads(mixed.__getstate__()))


def test_no_decoder_at_all_has_no_traits() -> None:
    traits = decoder_traits(None)
    assert not traits.byte_level
    assert not traits.byte_fallback
