"""Text of tokens that are bytes: an incremental UTF-8 decoder with replacement."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from chairlift_service.text.tokenizer import Tokenizer

_MAX_PENDING: Final = 3  # bytes that an unfinished UTF-8 character can have
_UTF8: Final = codecs.getincrementaldecoder("utf-8")
REPLACEMENT: Final = "\ufffd"


class ByteLevelText:
    """Text of one output, for byte-level decoders.

    Python's replacement handler and Rust's from_utf8_lossy, which the tokenizers library uses, both put one U+FFFD
    for each maximal part of a character (The Unicode Standard, section 3.9, U+FFFD Substitution), so that decoding
    piecewise gives what the library gives for the whole.
    """

    def __init__(self, *, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = _UTF8("replace")
        # A character starts at a byte that can stand nowhere else in one, so the last few bytes tell how the whole
        # prompt ends.
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _MAX_PENDING:
                break
        self._utf8.decode(tail)
        # Whether decode(prompt) ends in a U+FFFD for an unfinished character.
        self._prompt_told_replacement = bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        return self._new(self._utf8.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """U+FFFD for an unfinished character, else nothing."""
        return self._new(self._utf8.decode(b"", final=True))

    def _new(self, text: str) -> str:
        if self._prompt_told_replacement and text:
            self._prompt_told_replacement = False
            return text.removeprefix(REPLACEMENT)
        return text

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)
