"""What the worker says, applied to the generations that it concerns."""

from __future__ import annotations

import time

import msgspec
import structlog
from chairlift_worker.ipc.messages import EndingMsg, EndingReason, StepMsg

from chairlift_service import convert
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.requests.carried import ending_here
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.readers import Readers
from chairlift_service.requests.recorder import RequestRecorder
from chairlift_service.requests.registry import Registry
from chairlift_service.requests.request_tracer import RequestTracer
from chairlift_service.requests.step_tokens import tokens_of
from chairlift_service.requests.worker_port import WorkerPort

_log = structlog.get_logger(__name__)


class Dispatcher:
    """Applies each step's columns: starts, then tokens, then endings; then rings each reader's bell once.

    Output of a uid that is not live is late and discarded.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        readers: Readers,
        port: WorkerPort,
        recorder: RequestRecorder | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._registry = registry
        self._readers = readers
        self._port = port
        self._recorder = recorder
        self._tracer = tracer

    def apply(self, step: StepMsg) -> None:
        """Applies one step."""
        touched: dict[int, Generation] = {}
        for started in step.started:
            generation = self._registry.live(started.uid)
            if generation is not None:
                self._registry.start(generation, started.cached_tokens)
                touched[started.uid] = generation
        self._note_prompts(step, touched)
        self._append_tokens(step, touched)
        for ending in step.endings:
            generation = self._registry.live(ending.uid)
            if generation is not None:
                for failed in self._end(generation, ending):
                    touched[failed.uid] = failed
                touched[ending.uid] = generation
        for generation in touched.values():
            self._readers.notify(generation)

    def cancelled(self, uid: int) -> None:
        """Ends a request that no worker has, with CANCELLED; see `EndsHere`."""
        self.end_here(uid, EndingReason.CANCELLED)

    def end_here(self, uid: int, reason: EndingReason) -> None:
        """Ends a request that no worker has. Does nothing where it is over."""
        generation = self._registry.live(uid)
        if generation is not None:
            for ended in (generation, *self._end(generation, ending_here(generation, reason))):
                self._readers.notify(ended)

    def _note_prompts(self, step: StepMsg, touched: dict[int, Generation]) -> None:
        for told in step.prompts:
            generation = self._registry.live(told.uid)
            if generation is not None and generation.ending is None and generation.prompt_log is not None:
                generation.prompt_log.extend(told)
                touched[told.uid] = generation

    def _append_tokens(self, step: StepMsg, touched: dict[int, Generation]) -> None:
        recorder, now_ns = self._recorder, time.monotonic_ns()
        for token in tokens_of(step):
            uid = token.uid
            generation = self._registry.live(uid)
            if generation is None or generation.ending is not None or generation.output.stop is not None:
                continue
            touched[uid] = generation
            if recorder is not None:
                recorder.token(generation, now_ns)
            try:
                generation.append(token.token_id, token.logprob, token.top_ids, token.top_logprobs)
            except Exception:  # noqa: BLE001 - a fault in one request's text must end that request alone
                _log.exception("detokenisation failed", request_id=generation.request_id)
                generation.end(ServiceError(Reason.INTERNAL, "the output could not be turned into text"))
                self._port.cancel(uid)
                continue
            if generation.output.stop is not None:  # its ending is told when the worker has let go of it
                self._port.cancel(uid)

    def _end(self, generation: Generation, ending: EndingMsg) -> list[Generation]:
        """Ends it; returns the choices that fail with it, of which the worker is told."""
        ending = _as_told(generation, ending)
        if self._recorder is not None:
            self._recorder.ended(generation, ending)
        if self._tracer is not None:
            self._tracer.ended(generation, ending)
        failed = self._registry.confirm(generation, convert.ending_error(ending) or ending)
        for each in failed:
            self._port.cancel(each.uid)
        _log.info(
            "request ended",
            request_id=generation.request_id,
            reason=ending.reason.name,
            error=ending.error,
            prompt_tokens=generation.request.num_prompt_tokens,
            cached_tokens=generation.cached_tokens or 0,
            generated_tokens=len(generation.output),
            queued_ms=ending.queued_ns // 1_000_000,
            prefill_ms=ending.prefill_ns // 1_000_000,
            decode_ms=ending.decode_ns // 1_000_000,
            preemptions=ending.preemptions,
        )
        return failed


def _as_told(generation: Generation, ending: EndingMsg) -> EndingMsg:
    """The worker's ending as it is for readers."""
    if generation.ending is None and ending.reason in (EndingReason.STOP, EndingReason.LENGTH):
        generation.output.close()  # the text that was held back may complete a stop string
    if generation.output.stop is not None:
        ending = msgspec.structs.replace(ending, reason=EndingReason.STOP, error="")
    if generation.cancelled and ending.reason in (EndingReason.STOP, EndingReason.LENGTH):
        # It came to its end while the Cancel was on its way; what the canceller was told must be true.
        ending = msgspec.structs.replace(ending, reason=EndingReason.CANCELLED)
    return ending
