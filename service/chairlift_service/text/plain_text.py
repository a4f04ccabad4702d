"""Tokenising a text in some of whose parts control tokens are ordinary text."""

from __future__ import annotations

import bisect
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import models

from chairlift_service.text.control_tokens import Span

_FILLER: Final = "\U000f0000"  # for private use; no token has it


class PlainTextEncoder:
    """Does in two steps what the library's tokenizer does in one, which has no switch for parts of a text.

    One tokenizer finds the added tokens and nothing else, another does the rest. They share the vocabulary of the one
    that they are made from, and leave that as it is.
    """

    def __init__(self, *, backend: tokenizers.Tokenizer) -> None:
        self._model = backend.model
        self._ids = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        self._finder = _finder(backend)
        self._first = _without_added_tokens(backend, backend.pre_tokenizer)
        self._later = _without_added_tokens(backend, _without_first_prefix(backend.pre_tokenizer))

    def encode(self, text: str, *, plain: Sequence[Span]) -> list[int]:
        """Ids of `text`, without tokens that the tokenizer adds at its ends.

        A control token that stands at one of `plain`, which are in order, is encoded with the text around it as if the
        tokenizer did not have it. Raises ValueError where its text cannot be encoded in any other way.
        """
        found = self._finder.encode_batch([_masked(text, plain)], add_special_tokens=False)[0]
        ids: list[int] = []
        for token, (start, stop) in zip(found.tokens, found.offsets, strict=True):
            if token in self._ids:
                ids.append(self._ids[token])
            else:
                inside = plain[bisect.bisect_left(plain, (start, 0)) : bisect.bisect_left(plain, (stop, 0))]
                forbidden = {each: self._ids[each] for each in {text[first:last] for first, last in inside}}
                ids += self._piece(text[start:stop], first=start == 0, forbidden=forbidden)
        return ids

    def _piece(self, text: str, *, first: bool, forbidden: Mapping[str, int]) -> list[int]:
        """Ids of a text between control tokens. `first`: it begins the whole text."""
        encoder = self._first if first else self._later
        ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if set(ids).isdisjoint(forbidden.values()):
            return ids
        if encoder.normalizer is not None:
            text = encoder.normalizer.normalize_str(text)
        words = [text]
        if encoder.pre_tokenizer is not None:
            words = [word for word, _ in encoder.pre_tokenizer.pre_tokenize_str(text)]
        return [token_id for word in words for token_id in self._word(word, forbidden)]

    def _word(self, word: str, forbidden: Mapping[str, int]) -> list[int]:
        """Ids of a word. Some vocabularies have control tokens among the ordinary ones: their text is cut in two."""
        ids = [token.id for token in self._model.tokenize(word)]
        if set(ids).isdisjoint(forbidden.values()):
            return ids
        found = [word.index(text) for text in forbidden if text in word]
        cut = min(found, default=len(word)) + 1
        if cut >= len(word):
            raise ValueError(f"the text {word!r} cannot be encoded as anything but a control token")
        return self._word(word[:cut], forbidden) + self._word(word[cut:], forbidden)


def _masked(text: str, plain: Sequence[Span]) -> str:
    """`text` with the characters at `plain` replaced by ones that no token has."""
    parts, end = [], 0
    for start, stop in plain:
        parts += [text[end:start], _FILLER * (stop - start)]
        end = stop
    return "".join([*parts, text[end:]])


def _finder(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer to which everything between two added tokens is one unknown word."""
    finder = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    if backend.normalizer is not None:
        finder.normalizer = backend.normalizer
    added = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    finder.add_special_tokens([token for token in added if token.special])
    finder.add_tokens([token for token in added if not token.special])
    return finder


def _without_added_tokens(backend: tokenizers.Tokenizer, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    encoder = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        encoder.normalizer = backend.normalizer
    if pre_tokenizer is not None:
        encoder.pre_tokenizer = pre_tokenizer
    return encoder


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
