"""What one request has generated so far: an append-only log that any number of cursors can read."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Protocol

from chairlift_service.requests.top_logprobs import Top, TopLogprobs

_NUM_TOKEN_BYTES = 8  # id and log-probability
_NUM_PIECE_BYTES = 64  # a small str and its place in the list


class TextDecoder(Protocol):
    """Turns a growing list of tokens into text, holding back what may still change."""

    @property
    def found(self) -> str | None:
        """The stop string that the text has ended at."""
        ...

    def push(self, token_id: int) -> str:
        """Text that this token completed."""
        ...

    def finish(self) -> str:
        """Text of what was held back."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LogSlice:
    """Tokens `[index, index + len(token_ids))` of an output, and the text that they completed."""

    index: int
    token_ids: array[int]
    logprobs: array[float]  # NaN where the worker sent none
    text: str
    tops: Sequence[Top] = ()  # one for each token; empty where the worker sent none


class OutputLog:
    """Tokens, log-probabilities and text pieces of one output.

    ```
    index      0      1      2      3            the text of tokens [i, j) is pieces[i:j] joined; `tail` belongs
    token_ids  [ 40 ] [ 12 ] [ 97 ] [  2 ]       behind the last token and exists only once the output is over
    pieces     [ He ] [ '' ] [ é  ] [ '' ] tail
    ```
    A piece is what its token *completed*, so that a reader may start at any token index and still get, joined to
    what it had before, exactly the whole text.
    """

    __slots__ = (
        "_before",
        "_decoder",
        "_logprobs",
        "_num_text_bytes",
        "_pieces",
        "_tail",
        "_token_ids",
        "_tops",
        "stop",
    )

    def __init__(self, *, decoder: TextDecoder | None, before: str = "") -> None:
        """`before` is text that stands before that of the first token, and comes with it."""
        self._decoder = decoder
        self._before = before
        self.stop: str | None = None  # the stop string that the text has ended at; no token may follow
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._tops: TopLogprobs | None = None  # None: the worker sent none
        self._pieces: list[str] = []
        self._tail = ""
        self._num_text_bytes = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that the log takes."""
        return (
            len(self._token_ids) * _NUM_TOKEN_BYTES
            + len(self._pieces) * _NUM_PIECE_BYTES
            + self._num_text_bytes
            + len(self._tail)
            + (0 if self._tops is None else self._tops.num_bytes)
        )

    @property
    def last_token_id(self) -> int | None:
        """The newest token."""
        return self._token_ids[-1] if self._token_ids else None

    def append(
        self, token_id: int, logprob: float, top_ids: Sequence[int] = (), top_logprobs: Sequence[float] = ()
    ) -> None:
        """Adds one token, and the likeliest ones at its place. Raises what the decoder raises, with it counted."""
        self._token_ids.append(token_id)
        self._logprobs.append(logprob)
        if top_ids or self._tops is not None:
            self._tops = TopLogprobs() if self._tops is None else self._tops
            self._tops.append(top_ids, top_logprobs)
        if self._decoder is not None:
            piece, before, self._before = "", self._before, ""
            try:
                piece = before + self._decoder.push(token_id)
                self.stop = self._decoder.found
            finally:
                self._pieces.append(piece)
                self._num_text_bytes += len(piece)

    def close(self) -> None:
        """Adds the text that the decoder held back; no token follows. A second call does nothing."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            self._tail = self._before + decoder.finish()
            self.stop = decoder.found

    def slice(self, index: int, stop: int) -> LogSlice:
        """Tokens `[index, stop)`; a stop at the end, or beyond, brings the tail too."""
        text = "".join(self._pieces[index:stop])
        return LogSlice(
            index=index,
            token_ids=self._token_ids[index:stop],
            logprobs=self._logprobs[index:stop],
            text=text + self._tail if stop >= len(self._token_ids) else text,
            tops=() if self._tops is None else self._tops.slice(index, stop),
        )
