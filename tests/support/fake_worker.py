"""A worker without a model: it speaks the real protocol over the real rings and echoes prompts.

Token i of an output is `prompt[i % len(prompt)]`, so that a test knows every answer beforehand; of a further choice
`prompt[(i + seed) % len(prompt)]`. Its log-probability is -0.5 - i / 1024, that of token i of a prompt 2 less. As a
program it takes the place of `python -m chairlift_worker`; options come from $FAKE_WORKER, a JSON object with the
fields of `Script`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from array import array
from pathlib import Path

from chairlift_worker.ipc.channel import ServiceGoneError, WorkerChannel
from chairlift_worker.ipc.messages import (
    AddRequestMsg,
    CancelMsg,
    DoneMsg,
    EndingMsg,
    EndingReason,
    FlushedMsg,
    FlushPrefixCacheMsg,
    HoldMsg,
    ModelCardMsg,
    PauseMsg,
    PromptLogprobsMsg,
    ReadyMsg,
    ResumeMsg,
    SettingMsg,
    ShutdownMsg,
    StartedMsg,
    StartFailedMsg,
    StepMsg,
    Turn,
    UpdateWeightsMsg,
    WeightsMsg,
    WorkerMsg,
    decode_request,
    encode,
)
from chairlift_worker.ipc.status import Phase
from chairlift_worker.request import requests_of

VOCAB_SIZE = 512
CONTEXT_LEN = 2048
CACHE_LEN = 1024
EOS_ID = 0
NUM_FLUSHED = 7  # pages that a flush always brings
CACHED_TOKENS = 3  # prompt tokens that every request is said to have found in the prefix cache
BAD_FOLDER = "/bad"  # an update of the weights from here is refused with BAD_WEIGHTS
BAD_WEIGHTS = "INVALID_WEIGHTS: /bad: tensors missing in its files: one"
NUM_TENSORS = 3  # that every other update replaces; each adds SHIFT to the tokens that follow
SHIFT = 100
ERROR_TOKEN = 500  # a prompt that starts with it fails after two tokens
CRASH_TOKEN = 501  # a prompt that starts with it kills the worker when it starts
SWAPPED_TOKEN = 502  # a prompt that starts with it is said to have been in the swap pool, for a millisecond
ERROR_TEXT = "NUMERICAL_ERROR: the logits were not finite"


def logprob(index: int) -> float:
    """Log-probability of the token at `index`; exact in float32."""
    return -0.5 - index / 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """How the fake behaves."""

    tokenizer_dir: str = ""
    generation_config: dict[str, object] = dataclasses.field(default_factory=dict)
    context_len: int = CONTEXT_LEN
    cache_len: int = CACHE_LEN
    max_running: int = 64  # others wait
    step_s: float = 0.001  # pause before each step
    start_s: float = 0.0  # pause before it says that it is ready
    fail_start: str = ""  # says this instead, and exits
    crash_start: bool = False  # exits with code 3 and says nothing
    deaf: bool = False  # does not take messages off the ring
    ignore_shutdown: bool = False
    update_s: float = 0.0  # how long an update of the weights takes


@dataclasses.dataclass(slots=True)
class Row:
    """A request in the fake."""

    message: AddRequestMsg
    prompt: array[int]
    num_generated: int = 0
    started: bool = False
    held: bool = False

    @property
    def token(self) -> int:
        """The next one."""
        first = self.message.sampling.seed if self.message.fork_of else 0
        return self.prompt[(first + self.num_generated) % len(self.prompt)]

    def judge(self) -> PromptLogprobsMsg | None:
        """What is told of its prompt when it starts."""
        num_top, before = self.message.prompt_logprobs, self.message.resumed
        begin = max(1, before.prompt_logprobs if before else 1)
        if not num_top or begin >= len(self.prompt):
            return None
        places = [(self.prompt[i], logprob(i) - 2, n) for i in range(begin, len(self.prompt)) for n in range(num_top)]
        return PromptLogprobsMsg(
            uid=self.message.uid,
            index=begin,
            logprobs=array("f", [logprob(i) - 2 for i in range(begin, len(self.prompt))]).tobytes(),
            num_tops=bytes([num_top] * (len(self.prompt) - begin)) if num_top > 1 else b"",
            top_ids=array("i", [token + n for token, _, n in places]).tobytes() if num_top > 1 else b"",
            top_logprobs=array("f", [value - n for _, value, n in places]).tobytes() if num_top > 1 else b"",
        )


class FakeWorker:
    """The step loop."""

    def __init__(self, *, channel: WorkerChannel, script: Script) -> None:
        self._channel = channel
        self._script = script
        self._rows: dict[int, Row] = {}
        self._endings: list[EndingMsg] = []
        self._steps = 0
        self._generated = 0
        self._prompt_tokens = 0
        self._stopping = False
        self._paused = False
        self._update: tuple[float, UpdateWeightsMsg] | None = None  # when it will be over
        self._shift = 0

    def run(self) -> int:
        """Until told to stop; returns the exit code."""
        if not self._greet():
            return 1
        while not self._stopping:
            self.turn(wait_s=0.05)
        return 0

    def turn(self, *, wait_s: float = 0.0) -> None:
        """Takes what came in, and runs one step if there is anything to do."""
        if not self._script.deaf:
            while (record := self._channel.requests.receive()) is not None:
                self._handle(record)
        self._expire()
        self._end_update()
        if (not self._stands_still and any(not row.held for row in self._rows.values())) or self._endings:
            time.sleep(self._script.step_s)
            self._step()
        elif wait_s and self._script.deaf:
            time.sleep(wait_s)
        elif wait_s:
            self._channel.wait_for_request(wait_s)
        self._show()

    def _greet(self) -> bool:
        time.sleep(self._script.start_s)
        if self._script.crash_start:
            sys.exit(3)
        if self._script.fail_start:
            self._send(StartFailedMsg(message=self._script.fail_start))
            return False
        card = ModelCardMsg(
            name="fake",
            architecture="FakeForCausalLM",
            tokenizer_dir=self._script.tokenizer_dir,
            vocab_size=VOCAB_SIZE,
            context_len=self._script.context_len,
            cache_len=self._script.cache_len,
            eos_token_ids=(EOS_ID,),
            dtype="float32",
            num_parameters=1234,
            generation_config=self._script.generation_config,
        )
        settings = (SettingMsg(name="page_size", value="16", reason="the fake's own"),)
        self._send(ReadyMsg(model=card, settings=settings))
        return True

    def _handle(self, record: bytes) -> None:
        match decode_request(record):
            case AddRequestMsg() as message:
                self._add(message)
            case CancelMsg(uid=uid):
                self._end(uid, EndingReason.CANCELLED)
            case HoldMsg(uid=uid, held=held):
                if uid in self._rows:
                    self._rows[uid].held = held
            case FlushPrefixCacheMsg(op=op):
                self._send(FlushedMsg(op=op, num_pages=NUM_FLUSHED))
            case PauseMsg(op=op):
                self._paused = True
                self._send(DoneMsg(op=op))
            case ResumeMsg(op=op):
                self._paused = False
                self._send(DoneMsg(op=op))
            case UpdateWeightsMsg() as message:
                self._update = (time.monotonic() + self._script.update_s, message)
            case ShutdownMsg():
                self._stopping = not self._script.ignore_shutdown

    def _add(self, asked: AddRequestMsg) -> None:
        for message in (request.params for request in requests_of(asked)):
            row = self._rows[message.uid] = Row(message, array("i", message.prompt))
            if message.resumed is not None:
                row.num_generated = len(array("i", message.resumed.generated))
                row.started = message.resumed.started_ns > 0

    @property
    def _stands_still(self) -> bool:
        return self._paused or self._update is not None

    def _end_update(self) -> None:
        if self._update is None or self._update[0] > time.monotonic():
            return
        message = self._update[1]
        self._update = None
        bad = message.folder == BAD_FOLDER
        self._shift += 0 if bad else SHIFT
        started = sum(row.started for row in self._rows.values())
        self._send(
            WeightsMsg(
                op=message.op,
                error=BAD_WEIGHTS if bad else "",
                num_tensors=0 if bad else NUM_TENSORS,
                num_requests=0 if bad else started,
                num_pages=0 if bad else NUM_FLUSHED,
            )
        )

    def _expire(self) -> None:
        now_ns = time.monotonic_ns()
        for uid, row in list(self._rows.items()):
            if row.message.deadline_ns and row.message.deadline_ns <= now_ns:
                self._end(uid, EndingReason.DEADLINE)

    def _step(self) -> None:
        self._steps += 1
        uids, token_ids, logprobs = array("Q"), array("i"), array("f")
        num_tops, top_ids, top_logprobs = array("B"), array("i"), array("f")
        started, prompts = [], []
        moving = [] if self._stands_still else [(uid, row) for uid, row in self._rows.items() if not row.held]
        moving = moving[: self._script.max_running]
        self._channel.roll.note(self._steps, (uid for uid, _ in moving), depth=1)
        for uid, row in moving:
            if not row.started:
                row.started = True
                self._prompt_tokens += len(row.prompt)
                started.append(StartedMsg(uid=uid, cached_tokens=min(CACHED_TOKENS, len(row.prompt) - 1)))
                if row.prompt[0] == CRASH_TOKEN:
                    os.kill(os.getpid(), signal.SIGKILL)
                prompts += [judged] if (judged := row.judge()) else []
            if not row.message.max_new_tokens:
                self._end(uid, EndingReason.LENGTH)
                continue
            token = row.token + self._shift
            uids.append(uid)
            token_ids.append(token)
            logprobs.append(logprob(row.num_generated) if row.message.logprobs else float("nan"))
            num_tops.append(row.message.top_logprobs)
            top_ids.extend(token + place for place in range(num_tops[-1]))
            top_logprobs.extend(logprob(row.num_generated) - place for place in range(num_tops[-1]))
            row.num_generated += 1
            self._generated += 1
            if row.prompt[0] == ERROR_TOKEN and row.num_generated == 2:
                self._end(uid, EndingReason.ERROR, error=ERROR_TEXT)
            elif token in row.message.stop_ids:
                self._end(uid, EndingReason.STOP)
            elif row.num_generated == row.message.max_new_tokens:
                self._end(uid, EndingReason.LENGTH)
        endings, self._endings = self._endings, []
        self._show()  # first, so that whoever hears of the step sees the page as it is after it
        self._send(
            StepMsg(
                step=self._steps,
                uids=uids.tobytes(),
                token_ids=token_ids.tobytes(),
                logprobs=logprobs.tobytes(),
                started=tuple(started),
                endings=tuple(endings),
                num_tops=num_tops.tobytes() if top_ids else b"",
                top_ids=top_ids.tobytes(),
                top_logprobs=top_logprobs.tobytes(),
                prompts=tuple(prompts),
            )
        )

    def _end(self, uid: int, reason: EndingReason, *, error: str = "") -> None:
        row = self._rows.pop(uid, None)
        if row is None:
            return
        swapped_ns = row.message.arrival_ns + 4_000_000
        self._endings.append(
            EndingMsg(
                uid=uid,
                reason=reason,
                error=error,
                queued_ns=1_000_000,
                prefill_ns=2_000_000,
                decode_ns=3_000_000,
                swapped_ns=0,
                preemptions=0,
                cached_tokens=min(CACHED_TOKENS, len(row.prompt) - 1) if row.started else 0,
                turns=((Turn.SWAPPED, swapped_ns), (Turn.RESUMED, swapped_ns + 1_000_000))
                if row.prompt[0] == SWAPPED_TOKEN
                else (),
            )
        )

    def _send(self, message: WorkerMsg) -> None:
        self._channel.send_result(encode(message), heartbeat=self._channel.status.beat)

    def _show(self) -> None:
        running = sum(row.started for row in self._rows.values())
        self._channel.status.set(
            phase=Phase.PAUSED if self._stands_still else Phase.RUNNING if self._rows else Phase.IDLE,
            steps=self._steps,
            requests_waiting=len(self._rows) - running,
            requests_running=running,
            generated_tokens=self._generated,
            computed_tokens=self._generated,
            prompt_tokens=self._prompt_tokens,
        )


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    arguments = parser.parse_args()
    json.loads(arguments.settings)  # the service's own checks are tested elsewhere: it must be JSON
    script = Script(**json.loads(os.environ.get("FAKE_WORKER", "{}")))
    channel = WorkerChannel.attach(arguments.channel)
    try:
        return FakeWorker(channel=channel, script=script).run()
    except ServiceGoneError:
        return 0


COMMAND = (sys.executable, str(Path(__file__)))
"""What takes the place of `python -m chairlift_worker`."""


if __name__ == "__main__":
    sys.exit(main())
