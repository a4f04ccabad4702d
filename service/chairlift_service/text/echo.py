"""A prompt's own text, told before that of its output."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift_service.text.detokenizer import Detokenizer
from chairlift_service.text.tokenizer import Tokenizer


class OpenEnd:
    """The end of a prompt's text that is certain only with its output.

    A prompt may end inside a character, or in a run of byte tokens. Its last `num_open` tokens are therefore taken
    once more as if they were output; what comes of them beyond the output's own text is the prompt's.
    """

    def __init__(
        self, *, tokenizer: Tokenizer, prompt_ids: Sequence[int], num_open: int, skip_special_tokens: bool
    ) -> None:
        border = len(prompt_ids) - num_open
        text = Detokenizer(tokenizer=tokenizer, prompt_ids=prompt_ids[:border], skip_special_tokens=skip_special_tokens)
        self.certain = text.push_all(prompt_ids[border:])  # text of these tokens that the output cannot change
        self._text: Detokenizer | None = text  # None: the rest is told

    def push(self, token_id: int, piece: str) -> str:
        """The prompt's text that is certain with this token of the output, whose own text is `piece`."""
        if self._text is None:
            return ""
        whole = self._text.push(token_id)
        if whole:
            self._text = None
        return whole.removesuffix(piece)

    def finish(self, piece: str) -> str:
        """The output is over, and `piece` is the last of its text: the rest of the prompt's."""
        text, self._text = self._text, None
        return text.finish().removesuffix(piece) if text is not None else ""
