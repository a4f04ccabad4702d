"""Grammars over a model's own tokens, by llguidance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from chairlift_worker.constraint.errors import ConstraintError

MAX_KEPT: Final = 64
"""Compiled grammars that are kept for requests to come."""


class Grammars:
    """Compiles grammars, each once as long as it is among the last `MAX_KEPT`. Of one thread at a time.

    The tokens are read with the first of them, in some tenths of a second.
    """

    def __init__(self, *, tokenizer_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` counts the rows of the output layer."""
        self._tokenizer_dir = tokenizer_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> LLMatcher:
        """One at the beginning of its output. Raises ConstraintError."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
            if compiled.is_error():  # the service has looked at it, but knows no tokens
                raise ConstraintError(f"INVALID_VALUE: the constraint cannot be used: {compiled.get_error()}")
            self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    @property
    def num_tokens(self) -> int:
        """Tokens that a mask has a bit for: at least the rows of the output layer. Raises ConstraintError."""
        return self._tokens.vocab_size

    @cached_property
    def _tokens(self) -> LLTokenizer:
        eos = self._eos_token_ids or None
        try:
            text = (self._tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8")
            tokens = LLTokenizer(text, eos_token=eos)
            if tokens.vocab_size < self._vocab_size:
                tokens = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
        except Exception as error:  # whatever is odd about it, other requests do without
            raise ConstraintError(f"UNSUPPORTED_OPTION: no constraints over this model's tokens: {error}") from error
        return tokens
