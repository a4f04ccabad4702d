"""To which sizes batches are padded, so that few sizes come up.

| what                        | decode fast path                    | any batch (varlen)                             |
|-----------------------------|-------------------------------------|------------------------------------------------|
| tokens                      | next power of two, at most max_rows | next multiple of q_interval                    |
| rows                        | as many as tokens                   | next multiple of q_interval                    |
| places to sample at         | as many as tokens                   | as many as rows if that is enough, else tokens |
| context, so width of tables | decode_len                          | next multiple of kv_interval                   |

A varlen batch becomes one of at least one row and one token more wherever it becomes larger at all: each row that
belongs to nobody needs a token, and each such token a row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """The sizes of a padded batch."""

    in_place: bool  # whether it is one of the decode fast path
    num_tokens: int
    num_rows: int
    num_sampled: int  # places whose logits are wanted
    context_len: int  # that its tables have room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The sizes that there are."""

    q_interval: int
    kv_interval: int
    max_tokens: int  # of a batch before it is padded
    max_rows: int
    max_context_len: int
    decode_len: int = 0  # context of the decode fast path; 0: there is none

    def rounded(self, number: int, *, in_place: bool) -> int:
        """Tokens, or places to sample at, as they are padded where nothing is captured."""
        if in_place:
            return min(1 << max(number - 1, 0).bit_length(), self.max_rows)
        return round_up(max(number, 1), self.q_interval)

    def shape(
        self, *, in_place: bool, num_tokens: int, num_rows: int, num_sampled: int, context_len: int
    ) -> PaddedShape:
        """What a batch of these sizes is padded to."""
        if in_place:
            size = self.rounded(num_rows, in_place=True)
            return PaddedShape(True, size, size, size, self.decode_len)  # noqa: FBT003
        interval = self.q_interval
        rows = round_up(num_rows, interval)
        if rows == num_rows and num_tokens % interval:
            rows += interval  # the tokens that are missing need a row
        tokens = round_up(num_tokens + rows - num_rows, interval)
        longest = -(-(tokens - num_tokens) // (rows - num_rows)) if rows > num_rows else 0
        context = round_up(max(context_len, longest), self.kv_interval)
        return PaddedShape(False, tokens, rows, rows if num_sampled <= rows else tokens, context)  # noqa: FBT003

    def decode_sizes(self) -> list[int]:
        """All numbers of rows that batches of the decode fast path are padded to."""
        if not self.decode_len:
            return []
        powers = itertools.takewhile(lambda size: size < self.max_rows, (1 << bits for bits in itertools.count()))
        return [*powers, self.max_rows]

    def varlen_sizes(self, *, captured: bool) -> list[int]:
        """All numbers of tokens that other batches are padded to; captured ones may need some for rows of nobody."""
        most = self.largest().num_tokens if captured else round_up(self.max_tokens, self.q_interval)
        return list(range(self.q_interval, most + 1, self.q_interval))

    def largest(self) -> PaddedShape:
        """A shape that is nowhere smaller than any other one."""
        interval = self.q_interval
        rows = round_up(self.max_rows + 1, interval)
        tokens = round_up(self.max_tokens + interval, interval)
        context = round_up(max(self.max_context_len, self.decode_len, 2 * interval), self.kv_interval)
        return PaddedShape(False, tokens, rows, max(tokens, rows), context)  # noqa: FBT003

    def max_shapes(self, *, varlen: bool, decode: bool) -> int:
        """How many shapes there can be on these paths."""
        largest = self.largest()
        by_context, most_rows = largest.context_len // self.kv_interval, largest.num_rows
        by_size = 0
        for tokens in self.varlen_sizes(captured=True):
            by_rows = min(tokens, most_rows) // self.q_interval  # there are never more rows than tokens
            by_size += 2 * by_rows - (tokens <= most_rows)  # sampled at as many places as there are rows, or tokens
        return varlen * by_size * by_context + decode * len(self.decode_sizes())


def round_up(number: int, interval: int) -> int:
    """The next multiple of the interval, or the number itself."""
    return -(-number // interval) * interval
