"""Tokenising a text in some of whose parts control tokens are ordinary text."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers

from chairlift_service.text.control_tokens import Span

_FILLER: Final = "\U000f0000"  # for private use; no token has it


class PlainTextEncoder:
    """Reads and never changes the library's tokenizer, whose added tokens have no switch for parts of a text."""

    def __init__(self, *, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._first: Any = backend.pre_tokenizer
        self._later: Any = _without_first_prefix(backend.pre_tokenizer)

    def encode(self, text: str, *, plain: Sequence[Span]) -> list[int]:
        """Ids of `text`, without tokens that the tokenizer adds at its ends.

        A control token that stands at one of `plain`, which are in order, is encoded with the text around it as if the
        tokenizer did not have it. Raises ValueError where its text cannot be encoded in any other way.
        """
        masked, end = "", 0
        for start, stop in plain:
            masked += text[end:start] + _FILLER * (stop - start)
            end = stop
        encoding = self._backend.encode(masked + text[end:], add_special_tokens=False)
        ids: list[int] = []
        end = 0
        # The tokens that are left cut the text into pieces that have none.
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._added.get(token_id)
            if token is not None and (token.normalized or token.content in text[start:stop]):
                ids += self._piece(text[end:start], first=end == 0, forbidden=self._inside(text, plain, end, start))
                ids.append(token_id)
                end = stop
        return ids + self._piece(text[end:], first=end == 0, forbidden=self._inside(text, plain, end, len(text)))

    def _inside(self, text: str, plain: Sequence[Span], start: int, stop: int) -> Mapping[str, int]:
        """The control tokens at `plain` in a piece of the text: their ids by what they look like."""
        texts = {text[first:last] for first, last in plain if start <= first < stop}
        return {text: token_id for token_id, token in self._added.items() if (text := token.content) in texts}

    def _piece(self, text: str, *, first: bool, forbidden: Mapping[str, int]) -> list[int]:
        """Ids of a text without control tokens. `first`: it begins the whole text."""
        if not text:
            return []
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        words = [text]
        pre_tokenizer = self._first if first else self._later
        if pre_tokenizer is not None:
            words = [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
        return [token_id for word in words for token_id in self._word(word, forbidden)]

    def _word(self, word: str, forbidden: Mapping[str, int]) -> list[int]:
        """Ids of a word. Some vocabularies have control tokens among the ordinary ones: their text is cut in two."""
        ids = [token.id for token in self._backend.model.tokenize(word)]
        if set(ids).isdisjoint(forbidden.values()):
            return ids
        found = [word.index(text) for text in forbidden if text in word]
        cut = min(found, default=len(word)) + 1
        if cut >= len(word):
            raise ValueError(f"the text {word!r} cannot be encoded as anything but a control token")
        return self._word(word[:cut], forbidden) + self._word(word[cut:], forbidden)


def _without_first_prefix(pre_tokenizer: Any) -> Any:
    """The same for a text that does not begin the whole: without a ▁ that is only put in front of the whole."""
    if pre_tokenizer is None:
        return None
    described = json.loads(pre_tokenizer.__getstate__())
    for part in [described, *described.get("pretokenizers", ())]:
        if part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
    later = copy.deepcopy(pre_tokenizer)
    later.__setstate__(json.dumps(described).encode())
    return later
