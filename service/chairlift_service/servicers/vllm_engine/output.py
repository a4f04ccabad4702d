"""A generation's output as gateways are told it."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from chairlift.v1 import event_pb2
from chairlift_worker.ipc.messages import EndingMsg
from smg_grpc_proto.generated import vllm_engine_pb2 as _pb

from chairlift_service.requests.generation import Generation
from chairlift_service.requests.output_log import LogSlice
from chairlift_service.servicers import events
from chairlift_service.servicers.vllm_engine.asked import Asked
from chairlift_service.servicers.vllm_engine.stop_strings import StopStrings

_FINISH_REASONS: Final = {
    event_pb2.FINISH_REASON_STOP: "stop",
    event_pb2.FINISH_REASON_LENGTH: "length",
    event_pb2.FINISH_REASON_CANCELLED: "abort",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string, and the number of tokens up to the one that completed it."""

    stop: str
    num_tokens: int


class Output:
    """Makes the messages of one generation, and finds where one of its stop strings ends it."""

    def __init__(self, *, generation: Generation, asked: Asked) -> None:
        self._generation = generation
        self._asked = asked
        self._stops = StopStrings(asked.stops)

    def stopped(self, piece: LogSlice) -> Stopped | None:
        """Whether a stop string is complete with this slice of the log, the next one."""
        if not self._stops:
            return None
        log, end = self._generation.output, piece.index + len(piece.token_ids)
        if end == piece.index:  # text that was held back until the end
            stop = self._stops.push(piece.text)
            return None if stop is None else Stopped(stop, end)
        for index in range(piece.index, end):
            stop = self._stops.push(log.slice(index, index + 1).text)
            if stop is not None:
                return Stopped(stop, index + 1)
        return None

    def chunk(self, piece: LogSlice, *, stop: int | None = None) -> Any:
        """The slice's tokens, those before `stop`."""
        end = piece.index + len(piece.token_ids) if stop is None else stop
        generation, num = self._generation, end - piece.index
        chunk = _pb.GenerateStreamChunk(
            token_ids=piece.token_ids[:num],
            prompt_tokens=generation.request.num_prompt_tokens,
            completion_tokens=end,
            cached_tokens=generation.cached_tokens or 0,
        )
        self._add_logprobs(chunk.output_logprobs, piece, num)
        return _pb.GenerateResponse(chunk=chunk)

    def complete(self, ending: EndingMsg | Stopped) -> Any:
        """The ending, with the whole output."""
        generation = self._generation
        num = ending.num_tokens if isinstance(ending, Stopped) else len(generation.output)
        whole = generation.output.slice(0, num)
        complete = _pb.GenerateComplete(
            output_ids=whole.token_ids,
            prompt_tokens=generation.request.num_prompt_tokens,
            completion_tokens=num,
            cached_tokens=generation.cached_tokens or 0,
        )
        self._add_logprobs(complete.output_logprobs, whole, num)
        if isinstance(ending, Stopped):
            complete.finish_reason = "stop"
            complete.matched_stop_str = ending.stop
            return _pb.GenerateResponse(complete=complete)
        finished = events.finished(generation, ending)
        complete.finish_reason = _FINISH_REASONS[finished.reason]
        # EOS is no stop of a caller's.
        if finished.HasField("stop") and finished.stop.token_id in self._asked.message.stop.token_ids:
            complete.matched_token_id = finished.stop.token_id
        return _pb.GenerateResponse(complete=complete)

    def _add_logprobs(self, message: Any, piece: LogSlice, num: int) -> None:
        if not self._asked.logprobs:
            return
        message.token_ids.extend(piece.token_ids[:num])
        message.token_logprobs.extend(piece.logprobs[:num])
        for token_id, logprob in zip(piece.token_ids[:num], piece.logprobs[:num], strict=True):
            if self._asked.top_logprobs:
                message.top_logprobs.add(token_ids=[token_id], values=[logprob])
            else:
                message.top_logprobs.add()
