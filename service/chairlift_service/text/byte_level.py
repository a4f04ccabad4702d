"""Text of tokens that are bytes: an incremental UTF-8 decoder with replacement."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from chairlift_service.text.tokenizer import Tokenizer

_MAX_PENDING: Final = 3  # bytes that an unfinished UTF-8 character can have
_CONTINUATION: Final = (0x80, 0xBF)  # bytes that begin no character
_UTF8: Final = codecs.getincrementaldecoder("utf-8")


class ByteLevelText:
    """Text of one output, for byte-level decoders.

    Python's replacement handler and Rust's from_utf8_lossy, which the tokenizers library uses, both put one U+FFFD
    for each maximal part of a character (The Unicode Standard, section 3.9, U+FFFD Substitution), so that decoding
    piecewise gives what the library gives for the whole.
    """

    likely: Final = ""  # whole characters are certain

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
        pending = self._utf8.getstate()[0]
        # The U+FFFD in which decode(prompt) ends for an unfinished character; two for the beginning of a surrogate,
        # which Python's decoder takes for unfinished, too.
        self._prompt_told = pending.decode(errors="replace")
        self.num_open = self._num_tokens_of(len(pending), prompt_ids) if pending else 0

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        return self._new(self._utf8.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """U+FFFD for an unfinished character, else nothing."""
        return self._new(self._utf8.decode(b"", final=True))

    def _new(self, text: str) -> str:
        if self._prompt_told and text:
            told, self._prompt_told = self._prompt_told, ""
            return text.removeprefix(told)
        return text

    def _num_tokens_of(self, num_pending: int, prompt_ids: Sequence[int]) -> int:
        """How many tokens at the end have the unfinished character: as many more as begin inside another one."""
        num_bytes = 0
        for num, token_id in enumerate(reversed(prompt_ids), start=1):
            raw = self._bytes(token_id)
            num_bytes += len(raw)
            if num_bytes >= num_pending and raw and not _CONTINUATION[0] <= raw[0] <= _CONTINUATION[1]:
                return num
        return len(prompt_ids)

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)
