"""A reader's place in one generation's events."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from chairlift_worker.ipc.messages import EndingMsg

from chairlift_service.errors import ServiceError
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.output_log import LogSlice
from chairlift_service.requests.prompt_log import PromptEntry
from chairlift_service.validate import MAX_STREAM_INTERVAL

MAX_DELTA_TOKENS: Final = MAX_STREAM_INTERVAL
"""Tokens of one delta at most, so that a reader far behind gets messages of bounded size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """The request has started, or has ended without starting: `accepted` can be told."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """The request's ending. Nothing follows."""

    ending: EndingMsg | ServiceError


@dataclasses.dataclass(frozen=True, slots=True)
class PromptSlice:
    """Log-probabilities of the prompt's tokens `[index, index + len(entries))`."""

    index: int
    entries: Sequence[PromptEntry]


Event = Started | PromptSlice | LogSlice | Ended


class Cursor:
    """Yields a generation's events in order, each once: started, slices of its prompt's and its own log, ended.

    Nothing is buffered: whoever comes late gets the tokens that came meanwhile as one slice. Whoever has tokens already
    has all of the prompt's log-probabilities, which came before them.
    """

    __slots__ = ("_drained", "_prompt_index", "_told_ending", "_told_start", "generation", "index")

    def __init__(self, *, generation: Generation, index: int = 0) -> None:
        self.generation = generation
        self.index = index
        self._prompt_index = generation.request.num_prompt_tokens if index else 0  # told up to there
        self._told_start = False
        self._drained = False  # the log is closed, and all of it is told
        self._told_ending = False

    @property
    def num_unread(self) -> int:
        """Tokens of the log that are not told yet."""
        return len(self.generation.output) - self.index

    def next_event(self) -> Event | None:
        """The next event; None where there is nothing to tell yet, or nothing any more."""
        generation = self.generation
        ending = generation.ending
        if not self._told_start:
            if not generation.started and not isinstance(ending, EndingMsg):
                return self._next_ending()
            self._told_start = True
            return Started()
        return self._next_of_prompt() or self._next_slice() or self._next_ending()

    def _next_of_prompt(self) -> PromptSlice | None:
        log, index = self.generation.prompt_log, self._prompt_index
        if log is None or index >= len(log):
            return None
        self._prompt_index = min(index + MAX_DELTA_TOKENS, len(log))
        return PromptSlice(index, log.slice(index, self._prompt_index))

    def _next_slice(self) -> LogSlice | None:
        """The log from here on, unless it holds nothing yet of what was asked.

        Where only text was asked, tokens without text wait for the next one that has some.
        """
        output = self.generation.output
        closed = self.generation.ending is not None
        if self._drained or (self.index >= len(output) and not closed):
            return None
        request = self.generation.request
        if not closed and self.num_unread < request.stream_interval:
            return None
        stop = self.index
        while True:
            stop = min(stop + MAX_DELTA_TOKENS, len(output))
            at_end = stop >= len(output)
            piece = output.slice(self.index, stop)
            told = piece.text or (piece.token_ids and (request.want_ids or request.want_logprobs))
            if told or at_end:
                self._drained = closed and at_end
                break
        if not told:
            return None
        self.index = stop
        return piece

    def _next_ending(self) -> Ended | None:
        if self.generation.ending is None or self._told_ending:
            return None
        self._told_ending = True
        return Ended(self.generation.ending)
