"""How far one request's output has come in its grammar."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from llguidance import LLMatcher

from chairlift_worker.constraint.errors import ConstraintError

_WORD_BITS = 32


class Matcher:
    """Says which tokens may come next. It must be told each token that came."""

    def __init__(self, native: LLMatcher, *, num_tokens: int) -> None:
        """`num_tokens` are those that a mask has a bit for."""
        self._native = native
        self._mask = (ctypes.c_uint32 * -(-num_tokens // _WORD_BITS))()
        self._masked_at = -1  # the number of tokens that `_mask` comes behind
        self.num_tokens = 0  # of the output, that it was told

    @property
    def is_complete(self) -> bool:
        """Whether the output has its form and nothing can follow."""
        return self._native.is_stopped() and not self._native.is_error()

    def feed(self, token_ids: Sequence[int]) -> None:
        """Tells it of tokens. Raises ConstraintError for one that may not come."""
        for token_id in token_ids:
            if not self._native.consume_token(token_id):
                raise ConstraintError(f"INTERNAL: {self._native.get_error() or 'a token came that may not'}")
            self.num_tokens += 1

    def mask(self, num_tokens: int) -> int:
        """Where a bit for each token stands, set if it may come behind so many tokens; until the next call.

        Tokens that it was told beyond them are forgotten. Raises ConstraintError.
        """
        if num_tokens > self.num_tokens:
            raise ConstraintError(f"INTERNAL: token {self.num_tokens} of a constrained output was never seen")
        if num_tokens < self.num_tokens:  # the step is computed a second time
            self._native.rollback(self.num_tokens - num_tokens)
            self.num_tokens = num_tokens
        if self._masked_at != num_tokens:
            self._native.unsafe_compute_mask_ptr(ctypes.addressof(self._mask), ctypes.sizeof(self._mask))
            if self._native.is_error():
                raise ConstraintError(f"INVALID_VALUE: the constraint cannot be followed: {self._native.get_error()}")
            self._masked_at = num_tokens
        return ctypes.addressof(self._mask)
