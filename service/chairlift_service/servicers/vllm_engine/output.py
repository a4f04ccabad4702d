"""A generation's output as gateways are told it: of a request with several, one of its choices."""

from __future__ import annotations

from typing import Any, Final

from chairlift.v1 import event_pb2
from chairlift_worker.ipc.messages import EndingMsg
from smg_grpc_proto.generated import vllm_engine_pb2 as _pb

from chairlift_service.requests.generation import Generation
from chairlift_service.requests.output_log import LogSlice
from chairlift_service.servicers import events
from chairlift_service.servicers.vllm_engine.asked import Asked

_FINISH_REASONS: Final = {
    event_pb2.FINISH_REASON_STOP: "stop",
    event_pb2.FINISH_REASON_LENGTH: "length",
    event_pb2.FINISH_REASON_CANCELLED: "abort",
}


class Output:
    """Makes the messages of one generation."""

    def __init__(self, *, generation: Generation, asked: Asked) -> None:
        self._generation = generation
        self._asked = asked
        self._has_chunks = False

    def chunk(self, piece: LogSlice) -> Any:
        """The slice's tokens."""
        generation = self._generation
        chunk = _pb.GenerateStreamChunk(
            token_ids=piece.token_ids,
            prompt_tokens=generation.request.num_prompt_tokens,
            completion_tokens=piece.index + len(piece.token_ids),
            cached_tokens=generation.cached_tokens or 0,
            index=generation.choice,
        )
        self._add_logprobs(chunk.output_logprobs, piece)
        if not self._has_chunks:
            self._add_prompt_logprobs(chunk)
            self._has_chunks = True
        return _pb.GenerateResponse(chunk=chunk)

    def complete(self, ending: EndingMsg) -> Any:
        """The ending, with the whole output."""
        generation = self._generation
        whole = generation.output.slice(0, len(generation.output))
        complete = _pb.GenerateComplete(
            output_ids=whole.token_ids,
            prompt_tokens=generation.request.num_prompt_tokens,
            completion_tokens=len(whole.token_ids),
            cached_tokens=generation.cached_tokens or 0,
            index=generation.choice,
        )
        self._add_logprobs(complete.output_logprobs, whole)
        self._add_prompt_logprobs(complete)
        finished = events.finished(generation, ending)
        complete.finish_reason = _FINISH_REASONS[finished.reason]
        if finished.stop.text:
            complete.matched_stop_str = finished.stop.text
        # EOS is no stop of a caller's.
        elif finished.HasField("stop") and finished.stop.token_id in self._asked.message.stop.token_ids:
            complete.matched_token_id = finished.stop.token_id
        return _pb.GenerateResponse(complete=complete)

    def _add_logprobs(self, message: Any, piece: LogSlice) -> None:
        if not self._asked.logprobs:
            return
        message.token_ids.extend(piece.token_ids)
        message.token_logprobs.extend(piece.logprobs)
        if not self._asked.top_logprobs:
            message.top_logprobs.extend(_pb.TopLogProbs() for _ in piece.token_ids)
            return
        chosen = (((token_id, logprob),) for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True))
        for top in piece.tops or chosen:
            entry = message.top_logprobs.add()
            for token_id, logprob in top:
                entry.token_ids.append(token_id)
                entry.values.append(logprob)

    def _add_prompt_logprobs(self, message: Any) -> None:
        """Those of the whole prompt, which come before the first token; in choice 0 alone."""
        log, request = self._generation.prompt_log, self._generation.request
        if log is None:
            return
        told = message.input_logprobs
        for token_id, entry in zip(request.prompt_ids, log.slice(0, len(log)), strict=False):
            told.token_ids.append(token_id)
            told.token_logprobs.add(value=entry.logprob)
            tops = told.top_logprobs.add()
            own = () if entry.logprob is None else ((token_id, entry.logprob),)
            for likely_id, logprob in (entry.top or own) if self._asked.top_prompt_logprobs else ():
                tops.token_ids.append(likely_id)
                tops.values.append(logprob)
