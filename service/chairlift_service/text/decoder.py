"""What a tokenizer's decoder does to tokens, as far as text that arrives piecewise must know."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>", re.ASCII)


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """Facts about a decoder.

    `byte_level`: a token is a string of bytes, each spelt as one character (GPT-2 style), and nothing else matters.
    `byte_fallback`: a run of tokens `<0x00>` to `<0xFF>` is text if all of it is UTF-8, else one U+FFFD for each.
    """

    byte_level: bool
    byte_fallback: bool


def decoder_traits(decoder: Mapping[str, Any] | None) -> DecoderTraits:
    """Traits of a decoder as tokenizer.json describes it. Raises ValueError for one whose text cannot be streamed."""
    kinds = [part["type"] for part in _flat(decoder)]
    if "ByteLevel" in kinds and set(kinds) - {"ByteLevel", "Fuse"}:
        raise ValueError(f"a decoder that mixes ByteLevel with others is not supported: {', '.join(kinds)}")
    return DecoderTraits(byte_level="ByteLevel" in kinds, byte_fallback="ByteFallback" in kinds)


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token in a byte-level vocabulary.

    Added tokens are plain text: one that has a character outside the alphabet stands for its own UTF-8 (as in the
    tokenizers library, decoders/byte_level.rs).
    """
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """The byte that a byte-fallback token stands for; None for other tokens."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


def _flat(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _flat(part)
    else:
        yield decoder


def _alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte of Latin-1 is itself, the others are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _alphabet()
