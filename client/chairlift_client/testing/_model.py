"""The model of the fake server: its tokens are bytes, and it repeats the prompt over and over.

A request's further choices begin their repetition at the prompt's second byte, its third, and so on.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field, replace
from typing import Final

from chairlift.v1 import chat_pb2, event_pb2, request_pb2

EOS_TOKEN_ID: Final = 256
VOCAB_SIZE: Final = 257
CONTEXT_LEN: Final = 4096
DEFAULT_MAX_NEW_TOKENS: Final = 16
MAX_CHOICES: Final = 128
LOGPROB_STEP: Final = 8.0  # by which each token is less likely than the one before it, whose id is one lower


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of a text."""
    return list(text.encode())


def render(chat: chat_pb2.Chat) -> str:
    """A conversation as text: a line `role: content` for each message, then `assistant: ` unless it is unwanted."""
    text = "".join(f"{message.role}: {message.content}\n" for message in chat.messages)
    if chat.continue_final_message:
        return text.removesuffix("\n")
    return text if chat.HasField("add_generation_prompt") and not chat.add_generation_prompt else text + "assistant: "


def decode(token_ids: list[int]) -> str:
    """The text of bytes; EOS has none."""
    return bytes(i for i in token_ids if i != EOS_TOKEN_ID).decode(errors="replace")


def constrained(constraint: request_pb2.Constraint) -> str | None:
    """The whole answer where it must have a form: the first of the choices, an empty object. None for other forms."""
    if constraint.json_object:
        return "{}"
    return constraint.choices.texts[0] if constraint.choices.texts else None


def logprob(index: int) -> float:
    """Log-probability of output token `index`: 0, -1/8, ... -7/8, and again."""
    return -(index % 8) / 8


@dataclass(kw_only=True)
class FakeRequest:
    """A request and its whole answer, which is known from the start; how much of it is out is the engine's matter.

    Of several choices the first one: it has the others in `choices`, after itself.
    """

    number: int
    request_id: str
    message: request_pb2.GenerationRequest
    prompt: list[int]
    max_new_tokens: int
    lowered_by: event_pb2.LengthLimit
    started: float
    choice: int = 0
    choices: list[FakeRequest] = field(init=False)
    output: list[int] = field(init=False)
    pieces: list[str] = field(init=False)
    cancelled: bool = False
    unwanted: bool = False  # forgotten once a stream has told its ending
    failure: event_pb2.Failed | None = None

    def __post_init__(self) -> None:
        stop = self.message.stop
        stops = set(stop.token_ids) | (set() if stop.ignore_eos else {EOS_TOKEN_ID})
        self.output = []
        form = constrained(self.message.constraint) if self.message.HasField("constraint") else None
        if form is not None:
            self.output = encode(form)[: self.max_new_tokens]
        while (
            form is None and len(self.output) < self.max_new_tokens and not (self.output and self.output[-1] in stops)
        ):
            self.output.append(self._chosen(stops))
        self.stopped = bool(self.output) and self.output[-1] in stops
        self.stop_text = ""
        self.is_complete = form is not None and self.output == encode(form)
        self.stopped = self.stopped or self.is_complete
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pieces = [decoder.decode(bytes([i])) if i != EOS_TOKEN_ID else "" for i in self.output]
        if self.pieces:
            self.pieces[-1] += decoder.decode(b"", final=True)
        self._cut_at_stop()
        if self.message.output.echo and self.pieces:
            self.pieces[0] = decode(self.prompt) + self.pieces[0]
        self.choices = [self]
        if not self.choice:
            self.choices += [replace(self, choice=i) for i in range(1, max(1, self.message.num_choices))]

    def _chosen(self, stops: set[int]) -> int:
        """The prompt's next token; in place of one that may not be chosen the next one that may."""
        sampling, place = self.message.sampling, self.choice + len(self.output)
        wanted = self.prompt[place % len(self.prompt)]
        banned = {*sampling.banned_token_ids, *(stops if len(self.output) < self.message.stop.min_new_tokens else ())}
        may_be = set(sampling.allowed_token_ids or range(VOCAB_SIZE)) - banned
        return next((i for i in (*range(wanted, VOCAB_SIZE), *range(wanted)) if i in may_be), wanted)

    def _cut_at_stop(self) -> None:
        """Ends the output at the token that completes the first stop string, and the text before that."""
        stop, text = self.message.stop, ""
        for index, piece in enumerate(self.pieces):
            text += piece
            found = [each for each in stop.strings if text.endswith(each)]
            if found and index + 1 >= stop.min_new_tokens:
                self.stop_text = max(found, key=len)
                cut = text if stop.include_stop else text.removesuffix(self.stop_text)
                del self.output[index + 1 :]
                self.pieces = [""] * (index + 1)
                self.pieces[-1] = cut
                self.stopped = True
                return

    def accepted(self) -> event_pb2.Accepted:
        """The request's first event."""
        return event_pb2.Accepted(
            request_id=self.request_id,
            prompt_tokens=len(self.prompt),
            cached_tokens=0,
            max_new_tokens=self.max_new_tokens,
            lowered_by=self.lowered_by,
            seed=self.message.seed,
            sampling=self.message.sampling,
            state=event_pb2.REQUEST_STATE_WAITING,
            min_new_tokens=self.message.stop.min_new_tokens,
            num_choices=len(self.choices),
        )

    def prompt_delta(self) -> event_pb2.Delta:
        """The log-probabilities of the prompt."""
        delta = event_pb2.Delta(state=event_pb2.REQUEST_STATE_PREFILLING)
        delta.prompt_logprobs.add()
        for index in range(1, len(self.prompt)):
            _add_logprobs(delta.prompt_logprobs.add(), self.prompt[index], index, self.message.logprobs.prompt_top_n)
        return delta

    def delta(self, start: int, end: int) -> event_pb2.Delta:
        """Output tokens start to end, in the forms asked."""
        asked = self.message.output
        state = event_pb2.REQUEST_STATE_DECODING
        if end == len(self.output):
            state = event_pb2.REQUEST_STATE_FINISHED
        delta = event_pb2.Delta(choice=self.choice, index=start, num_tokens=end - start, state=state)
        if asked.text or not asked.HasField("text"):
            delta.text = "".join(self.pieces[start:end])
        if asked.token_ids or not asked.HasField("token_ids"):
            delta.token_ids.extend(self.output[start:end])
        if self.message.logprobs.top_n:
            for index in range(start, end):
                _add_logprobs(delta.logprobs.add(), self.output[index], index, self.message.logprobs.top_n)
        return delta

    def finished(self) -> event_pb2.Finished:
        """The request's last event, or the choice's."""
        finished = event_pb2.Finished(
            choice=self.choice, usage=event_pb2.Usage(prompt_tokens=len(self.prompt), generated_tokens=len(self.output))
        )
        if self.cancelled:
            finished.reason = event_pb2.FINISH_REASON_CANCELLED
        elif self.stopped:
            finished.reason = event_pb2.FINISH_REASON_STOP
            if self.is_complete:
                finished.stop.constraint = True
            elif self.stop_text:
                finished.stop.text = self.stop_text
            else:
                finished.stop.token_id = self.output[-1]
        else:
            finished.reason = event_pb2.FINISH_REASON_LENGTH
            finished.limit = self.lowered_by or event_pb2.LENGTH_LIMIT_MAX_NEW_TOKENS
        return finished


def _add_logprobs(entry: event_pb2.TokenLogprobs, token_id: int, index: int, top_n: int) -> None:
    """Fills in what is told of token number `index` of an output or a prompt."""
    entry.chosen = logprob(index)
    for place in range(min(max(1, top_n), VOCAB_SIZE)):
        entry.top.add(token_id=(token_id + place) % VOCAB_SIZE, logprob=logprob(index) - LOGPROB_STEP * place)
