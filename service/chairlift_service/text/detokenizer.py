"""Text as tokens arrive: the pieces joined are decode(prompt + output) minus decode(prompt), however it is cut.

Where the prompt ends inside a character, the two texts share more than a prefix: a character that the output
completes belongs to the output; one that it spoils stood in the prompt's text as U+FFFD and is not told again.

Decoders differ in what a token's text depends on, so there are two ways:

- byte-level decoders (GPT-2 and its many heirs): a token is bytes, and nothing else matters -> `byte_level`;
- all others (SentencePiece and WordPiece styles): a token's text depends on whether it is the first, on the token
  before, and, for byte tokens, on the whole run of them -> `windowed`.

Both work on a bounded number of tokens for each one that arrives, whatever the length of prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from chairlift_service.text.byte_level import ByteLevelText
from chairlift_service.text.tokenizer import Tokenizer
from chairlift_service.text.windowed import WindowedText


class Detokenizer:
    """Turns one output's tokens into text, piece by piece. Nothing raises, whatever tokens the model chooses."""

    def __init__(self, *, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        make = ByteLevelText if tokenizer.traits.byte_level else WindowedText
        self._text: _Text = make(tokenizer=tokenizer, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)

    found: str | None = None  # its text has no end of its own

    @property
    def num_open(self) -> int:
        """Tokens at the prompt's end whose text the output may still change."""
        return self._text.num_open

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now, often that of earlier tokens, or nothing."""
        return self._text.push(token_id)

    @property
    def likely(self) -> str:
        """Text that the newest token completed if the output ends with it; nothing that `push` has returned."""
        return self._text.likely

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Takes several tokens."""
        return "".join(map(self._text.push, token_ids))

    def finish(self) -> str:
        """The output is over: returns what was held back. Once; then nothing."""
        return self._text.finish()


class _Text(Protocol):
    num_open: int

    @property
    def likely(self) -> str: ...

    def push(self, token_id: int, /) -> str: ...

    def finish(self) -> str: ...
