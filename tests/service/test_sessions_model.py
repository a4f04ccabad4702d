"""Detached requests, their sessions, readers and kept results, against a model that knows what each reader must see."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable

import pytest
from chairlift.v1 import generation_service_pb2 as pb
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.requests.canceller import Canceller
from chairlift_service.requests.cursor import Ended, Started
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.output_log import LogSlice
from chairlift_service.requests.readers import Target
from chairlift_service.requests.registry import check_free, readable
from chairlift_worker.ipc.messages import EndingReason
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.books import Books, ending, step

NAMES = ("a", "b", "c", "d")
SESSIONS = ("s", "t")
MANY = 2  # kept results that there is room for, about
TURNS = 12  # of the event loop, in which every reader has read all there is


@dataclasses.dataclass
class Known:
    """What the model knows of a request."""

    generation: Generation
    text: str = ""
    live: bool = True
    cancelled: bool = False
    kept: bool = False


@dataclasses.dataclass
class Seen:
    """What one call has been told of one request."""

    index: int
    started: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    endings: int = 0


@dataclasses.dataclass
class Call:
    """A call that reads, with all that it was told, by uid."""

    target: Target
    seen: dict[int, Seen]
    index: int = 0
    replaced: bool = False
    task: asyncio.Task[None] | None = None


class SessionsAgainstModel(RuleBasedStateMachine):
    """Each reader is told each token and each ending once, in order, whoever comes, goes, or is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.books = Books(max_bytes=MANY * 4300)
        self.canceller = Canceller(registry=self.books.registry, port=self.books.port)
        self.known: dict[int, Known] = {}  # by uid
        self.by_name: dict[str, int] = {}  # live or kept
        self.calls: list[Call] = []
        self._ended: list[Known] = []  # in the order of their endings

    def teardown(self) -> None:
        for call in self.calls:
            assert call.task is not None
            call.task.cancel()
        self._settle()
        assert not len(self.books.readers)
        self.loop.close()

    def _settle(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def _uids(self, *, live: bool) -> list[int]:
        return [uid for uid, known in self.known.items() if known.live is live]

    @rule(name=st.sampled_from(NAMES), session=st.sampled_from((None, *SESSIONS)))
    def one_is_added(self, name: str, session: str | None) -> None:
        before = self.by_name.get(name)
        if before is not None and self.known[before].live:
            with pytest.raises(ServiceError) as caught:
                check_free(self.books.registry, [name])
            assert caught.value.reason is Reason.DUPLICATE_REQUEST_ID
            return
        check_free(self.books.registry, [name])
        uid = len(self.known) + 1
        generation = self.books.add(uid, detached=True, session=session, name=name)
        if before is not None:
            self.known[before].kept = False
        self.known[uid] = Known(generation)
        self.by_name[name] = uid
        for call in self.calls:
            if not call.replaced and call.target == ("session", session):
                call.seen[uid] = Seen(index=0)
        self._settle()

    @precondition(lambda self: self._uids(live=True))
    @rule(data=st.data(), letters=st.text(alphabet="abc", min_size=1, max_size=4))
    def tokens_come(self, data: st.DataObject, letters: str) -> None:
        uid = data.draw(st.sampled_from(self._uids(live=True)))
        self.books.dispatcher.apply(step([(uid, ord(letter)) for letter in letters], started=[uid]))
        self.known[uid].text += letters
        self._settle()

    @precondition(lambda self: self._uids(live=True))
    @rule(data=st.data())
    def one_ends(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self._uids(live=True)))
        known = self.known[uid]
        reason = EndingReason.CANCELLED if known.cancelled else EndingReason.LENGTH
        self.books.dispatcher.apply(step(endings=[ending(uid, reason)]))
        known.live, known.kept = False, True
        self._settle()
        self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        """Whatever room there is, what is forgotten are those that ended first."""
        kept = [known for known in self.known.values() if known.kept]
        gone = [known for known in kept if known.generation not in self.books.kept]
        still = [known for known in kept if known.generation in self.books.kept]
        ended = self._ended
        ended.extend(known for known in kept if known not in ended)
        assert all(ended.index(a) < ended.index(b) for a in gone for b in still)
        for known in gone:
            self._is_gone(known)

    def _is_gone(self, known: Known) -> None:
        known.kept = False
        name = known.generation.request_id
        if self.by_name.get(name) == known.generation.uid:
            del self.by_name[name]
            with pytest.raises(ServiceError) as caught:
                readable(self.books.registry, name)
            assert caught.value.reason is Reason.RESULT_EXPIRED

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def a_call_reads_a_request(self, data: st.DataObject, name: str) -> None:
        uid = self.by_name.get(name)
        if uid is None:
            with pytest.raises(ServiceError):
                readable(self.books.registry, name)
            return
        assert readable(self.books.registry, name) is self.known[uid].generation
        index = data.draw(st.integers(0, len(self.known[uid].text)))
        self._read(Call(("request", uid), {uid: Seen(index=index)}, index), [self.known[uid].generation])

    @rule(session=st.sampled_from(SESSIONS))
    def a_call_reads_a_session(self, session: str) -> None:
        generations = self.books.registry.of_session(session)
        mine = [uid for uid, known in self.known.items() if known.live or known.kept]
        assert [generation.uid for generation in generations] == [
            uid for uid in mine if self.known[uid].generation.request.session == session
        ]
        self._read(Call(("session", session), {g.uid: Seen(index=0) for g in generations}), generations)

    def _read(self, call: Call, generations: Iterable[Generation]) -> None:
        for other in self.calls:
            if other.target == call.target and other.task is not None and not other.task.done():
                other.replaced = True
        call.task = self.loop.create_task(self._reading(call, generations))
        self.calls.append(call)
        self._settle()

    async def _reading(self, call: Call, generations: Iterable[Generation]) -> None:
        with self.books.readers.open(call.target) as reader:
            for generation in generations:
                reader.follow(generation, index=call.index)
            async for generation, event in reader.events():
                seen = call.seen[generation.uid]
                assert not seen.endings, "something comes behind an ending"
                assert isinstance(event, Started) or seen.started, "something comes before the start"
                match event:
                    case Started():
                        seen.started += 1
                    case LogSlice():
                        assert event.index == seen.index + len(seen.ids)
                        seen.ids += event.token_ids
                        seen.text += event.text
                    case Ended():
                        seen.endings += 1
                        if call.target[0] == "request":
                            return

    @precondition(lambda self: any(call.task is not None and not call.task.done() for call in self.calls))
    @rule(data=st.data())
    def a_call_is_given_up(self, data: st.DataObject) -> None:
        reading = [n for n, call in enumerate(self.calls) if call.task is not None and not call.task.done()]
        call = self.calls.pop(data.draw(st.sampled_from(reading)))
        assert call.task is not None
        call.task.cancel()
        self._settle()

    @rule(name=st.sampled_from(NAMES))
    def one_is_cancelled(self, name: str) -> None:
        uid = self.by_name.get(name)
        status = self.canceller.cancel(name)
        if uid is None:
            assert status in (pb.CANCEL_STATUS_NOT_FOUND, pb.CANCEL_STATUS_ALREADY_FINISHED)
        elif self.known[uid].live:
            assert status == pb.CANCEL_STATUS_CANCELLED
            assert uid in self.books.port.cancelled
            self.known[uid].cancelled = True
        else:
            assert status == pb.CANCEL_STATUS_ALREADY_FINISHED
            self._is_gone(self.known[uid])
        self._settle()

    @invariant()
    def every_call_was_told_all_that_there_is(self) -> None:
        for call in self.calls:
            assert call.task is not None
            if call.replaced:
                error = call.task.exception() if call.task.done() else None
                assert isinstance(error, ServiceError)
                assert error.reason is Reason.READER_REPLACED
                continue
            for uid, seen in call.seen.items():
                known = self.known[uid]
                assert "".join(map(chr, seen.ids)) == known.text[seen.index :]
                certain = known.text[:-1] if known.live else known.text  # each letter comes with the token after it
                assert seen.text == certain[max(seen.index - 1, 0) :]
                assert seen.endings == (not known.live)
                assert seen.started == (known.generation.started or not known.live)

    @invariant()
    def what_is_kept_is_bounded_and_nothing_else_is_held(self) -> None:
        assert self.books.kept.num_bytes <= MANY * 4300
        assert len(self.books.registry) == len(self.by_name)
        assert self.books.registry.num_live == len(self._uids(live=True))


TestSessionsAgainstModel = SessionsAgainstModel.TestCase
TestSessionsAgainstModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
