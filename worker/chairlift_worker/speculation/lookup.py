"""Prompt lookup: what followed the last time that a request's newest tokens stood in its text.

Source: transformers' prompt_lookup_num_tokens and vLLM's ngram speculation. Found by hash chains, as compressors do
(RFC 1951, section 4): `heads` has for each hash of `min_len` tokens the newest place where they end, `links` for each
place the next older one of the same hash. Both are of fixed size. What has the same hash by chance is told apart by
its tokens.
"""

from __future__ import annotations

from array import array
from typing import Final

# Places that are remembered; older ones are forgotten. They take 8 bytes each.
MAX_PLACES: Final = 1 << 15
MIN_PLACES: Final = 64
# Places looked at for one guess, newest first.
MAX_CANDIDATES: Final = 8


class PromptLookup:
    """An index of one request's tokens, which only grow."""

    __slots__ = ("_heads", "_links", "_mask", "_max_len", "_min_len", "_next")

    def __init__(self, *, min_len: int, max_len: int, num_tokens: int) -> None:
        """Looks for the last `max_len` down to `min_len` tokens, in a text that will have up to `num_tokens`."""
        places = 1 << max(MIN_PLACES - 1, min(num_tokens, MAX_PLACES) - 1).bit_length()
        self._mask = places - 1
        self._heads = array("i", [-1]) * places
        self._links = array("i", [-1]) * places
        self._min_len = min_len
        self._max_len = max_len
        self._next = min_len - 1  # the first place that is not in the index

    def catch_up(self, tokens: array[int], limit: int) -> None:
        """Takes up to `limit` more places into the index: all but the newest, behind which nothing is known."""
        begin, end = self._next, min(self._next + limit, len(tokens) - 1)
        if begin >= end:
            return
        heads, links, mask, first = self._heads, self._links, self._mask, begin - self._min_len + 1
        grams = zip(*[tokens[first + i : end - self._min_len + 1 + i] for i in range(self._min_len)], strict=True)
        for place, value in enumerate(map(hash, grams), start=begin):
            slot = value & mask
            links[place & mask] = heads[slot]
            heads[slot] = place
        self._next = end

    def propose(self, tokens: array[int], num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` tokens that may follow; none if the newest tokens are not found.

        They are what followed the longest match, of several the newest one. Where that reaches the end of the text, it
        goes on with the guess itself: a text that has begun to repeat itself will go on to.
        """
        place = self._longest(tokens)
        if place < 0 or num_tokens < 1:
            return ()
        found = tokens[place + 1 : place + 1 + num_tokens]
        return tuple((found * -(-num_tokens // len(found)))[:num_tokens])

    def _longest(self, tokens: array[int]) -> int:
        """Where the longest match ends; -1 if there is none."""
        last = len(tokens) - 1
        if last < self._min_len:
            return -1
        best, best_len = -1, self._min_len - 1
        place = self._heads[hash(tuple(tokens[last - self._min_len + 1 :])) & self._mask]
        for _ in range(MAX_CANDIDATES):
            if place <= max(-1, self._next - 1 - len(self._links)):  # the end of the chain, or forgotten
                break
            length = self._match_len(tokens, place, last)
            if length > best_len:
                best, best_len = place, length
                if length == self._max_len:
                    break
            place = self._links[place & self._mask]
        return best

    def _match_len(self, tokens: array[int], place: int, last: int) -> int:
        """How many tokens up to `place` are those up to `last`, at most max_len."""
        most = min(self._max_len, place + 1)
        for length in range(most):
            if tokens[place - length] != tokens[last - length]:
                return length
        return most
