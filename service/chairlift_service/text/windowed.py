"""Text of tokens that depends on their neighbours: decoding a window of the last tokens again and again."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from chairlift_service.text.decoder import fallback_byte
from chairlift_service.text.tokenizer import Tokenizer

_NUM_ANCHORS: Final = 4  # tokens kept before the point up to which text is told
_MAX_WINDOW: Final = 64  # where no token is fit to start a window, cut it anyway
_UTF8: Final = codecs.getincrementaldecoder("utf-8")


class WindowedText:
    """Text of one output, for decoders that are not byte-level.

        prompt + output, tokens without text left out
        ... | a window's tokens, decoded as one | an open run of byte tokens |
              `_window`: their text is told       `_run`: held back

    The first token of a text is special to these decoders (its leading space goes). The window therefore starts
    either where the whole text starts, or at a token that has text of its own, which keeps the next one from being
    first. Of a run of byte tokens nothing is told before it ends: one byte that is not UTF-8 turns all of it into
    U+FFFD. What its newest token completed, unless such a byte comes, is `likely`. The window never starts inside of a
    run.
    """

    def __init__(self, *, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._run: list[int] = []
        self.num_open = self._take_prompt(prompt_ids)
        self._num_told = len(self._decode(self._window))  # characters of the window's text
        self._num_prompt_run = len(self._run)  # tokens of the open run that are the prompt's
        self._run_utf8: codecs.IncrementalDecoder | None = _UTF8()  # None: the run is not UTF-8
        self.likely = ""
        for token_id in self._run:
            self._take_byte(self._byte(token_id) or 0)
        self.likely = ""

    def push(self, token_id: int) -> str:
        """Text that is certain with this token."""
        self.likely = ""
        if not self._has_text(token_id):
            return ""
        byte = self._byte(token_id)
        if byte is not None:
            self._run.append(token_id)
            self._take_byte(byte)
            return ""
        piece = self._close([token_id])
        self._trim()
        return piece

    def finish(self) -> str:
        """Text of an open run of byte tokens, else nothing."""
        return self._close([]) if self._run else ""

    def _close(self, after: list[int]) -> str:
        """Ends the run, moves it and the tokens `after` it into the window, and returns the text that this adds."""
        told = self._num_told_at_close()
        self._window += self._run + after
        self._run, self._num_prompt_run, self._run_utf8, self.likely = [], 0, _UTF8(), ""
        text = self._decode(self._window)
        self._num_told = len(text)
        return text[told:]

    def _take_byte(self, byte: int) -> None:
        """One byte more of the open run."""
        if self._run_utf8 is not None:
            try:
                self.likely = self._run_utf8.decode(bytes([byte]))
            except UnicodeDecodeError:
                self._run_utf8 = None

    def _num_told_at_close(self) -> int:
        """Characters of the window's text, the run added, that are told or the prompt's."""
        if not self._num_prompt_run:
            return self._num_told
        raw = bytes(self._byte(token_id) or 0 for token_id in self._run)
        try:
            raw.decode()
        except UnicodeDecodeError:  # one U+FFFD for each byte
            before = self._decode(self._window + self._run[: self._num_prompt_run])
            if self._decode(self._window + self._run).startswith(before):  # whose first byte, a space, has no text
                return len(before)
            return self._num_told + self._num_prompt_run
        utf8 = _UTF8()
        utf8.decode(raw[: self._num_prompt_run])
        num_whole = self._num_prompt_run - len(utf8.getstate()[0])
        return len(self._decode(self._window + self._run[:num_whole]))

    def _take_prompt(self, prompt_ids: Sequence[int]) -> int:
        """Fills the window and the run from the prompt's end. Returns how far from the end the run begins."""
        num_open = 0
        for num, token_id in enumerate(reversed(prompt_ids), start=1):
            if not self._has_text(token_id):
                continue
            if not self._window and self._byte(token_id) is not None:
                self._run.append(token_id)
                num_open = num
                continue
            self._window.append(token_id)
            enough = _NUM_ANCHORS if self._can_start(token_id) else _MAX_WINDOW
            if len(self._window) >= enough and self._byte(token_id) is None:
                break
        self._window.reverse()
        self._run.reverse()
        return num_open

    def _trim(self) -> None:
        """Forgets the window's first tokens, where it has more than enough. Its last one is no byte token."""
        num = len(self._window)
        if num <= 2 * _NUM_ANCHORS:
            return
        starts = (i for i in range(num - _NUM_ANCHORS, 0, -1) if self._can_start(self._window[i]))
        start = next(starts, num - 1 if num > _MAX_WINDOW else 0)
        if start:
            del self._window[:start]
            self._num_told = len(self._decode(self._window))

    def _can_start(self, token_id: int) -> bool:
        """Whether a window can start at the token: it has text besides spaces, and is no byte of a run."""
        return self._byte(token_id) is None and self._decode([token_id]).strip(" \u2581") != ""

    def _byte(self, token_id: int) -> int | None:
        return fallback_byte(self._tokenizer.token(token_id) or "") if self._tokenizer.traits.byte_fallback else None

    def _has_text(self, token_id: int) -> bool:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return False
        return self._tokenizer.token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
