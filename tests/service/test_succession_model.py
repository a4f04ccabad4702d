"""Requests while workers come and go, against a model that knows who has what. The workers are played by the test."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from chairlift_service import convert
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.lifecycle import Lifecycle
from chairlift_service.requests.canceller import Canceller
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.lease import Lease
from chairlift_service.workers.line import WorkerLine
from chairlift_service.workers.succession import MAX_LOSSES, Succession
from chairlift_worker.ipc.messages import AddRequestMsg, EndingReason, ModelCardMsg
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.books import Books, ending, step

MODEL = ModelCardMsg(
    name="played",
    architecture="Played",
    tokenizer_dir="",
    vocab_size=384,
    context_len=64,
    cache_len=64,
    eos_token_ids=(),
    dtype="float32",
    num_parameters=1,
    generation_config={},
)
TURNS = 40  # of the event loop, in which all that can be done at once is done


class PlayedLink:
    """Notes what a worker is sent, and how far each request was at that time."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.broken = asyncio.get_running_loop().create_future()
        self.added: list[int] = []
        self.cancelled: set[int] = set()

    def add(self, messages: Sequence[AddRequestMsg]) -> None:
        for message in messages:
            generation = self._books.registry.live(message.uid)
            assert generation is not None, "a worker is sent what is over"
            sent = array("i", message.resumed.generated if message.resumed else b"")
            assert sent == generation.output.slice(0, len(generation.output)).token_ids, "tokens are lost or doubled"
            self.added.append(message.uid)

    def cancel(self, uid: int) -> None:
        self.cancelled.add(uid)

    def hold(self, uid: int, *, held: bool) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class PlayedWorker:
    """A worker that is lost when the test says so."""

    def __init__(self, books: Books) -> None:
        loop = asyncio.get_running_loop()
        self.link = PlayedLink(books)
        self.present: frozenset[int] = frozenset()
        self.channel = SimpleNamespace(roll=SimpleNamespace(read=lambda: self.present), status=None)
        self.supervisor = SimpleNamespace(lost=loop.create_future(), pids=(1,), start=self._start)

    async def _start(self) -> Any:
        return SimpleNamespace(model=MODEL, settings=())

    async def end(self, *, patience_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Factory:
    """Makes them."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.latest: PlayedWorker | None = None

    def make(self, *, sink: object, incarnation: int) -> PlayedWorker:
        self.latest = PlayedWorker(self._books)
        return self.latest

    def like(self, settings: object) -> Factory:
        return self


class SuccessionAgainstModel(RuleBasedStateMachine):
    """Nobody is lost, sent twice, overtaken, or blamed for what another did."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.books, self.line = Books(), WorkerLine()
        self.leases: dict[int, Lease] = {}
        self.unwanted: set[int] = set()  # cancelled, or left
        self.losses: dict[int, int] = {}  # by uid, of all that there ever were
        self.on_trial: int | None = None
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        self.factory = Factory(self.books)
        figures = SimpleNamespace(watch=lambda status: None, bury=lambda: None, has_stepped=True)
        self.canceller = Canceller(registry=self.books.registry, port=self.line)
        self.succession = Succession(
            factory=cast("Any", self.factory),
            line=self.line,
            lifecycle=Lifecycle(healths=()),
            registry=self.books.registry,
            dispatcher=self.books.dispatcher,
            figures=cast("Any", figures),
            restart_limit_s=60,
        )
        await self.succession.start()

    def teardown(self) -> None:
        self.loop.run_until_complete(self.succession.stop(patience_s=0))
        self.loop.close()

    @property
    def worker(self) -> PlayedWorker:
        assert self.factory.latest is not None
        return self.factory.latest

    def _there(self) -> list[Generation]:
        """What the worker has, and has not told the ending of."""
        live = [self.books.registry.live(uid) for uid in self.worker.link.added]
        return [generation for generation in live if generation is not None]

    def _settle(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            await asyncio.sleep(0.006)  # a request on trial is looked after so often
            await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        trial = self.worker.link.added[-1:]
        if trial and self.losses[trial[0]] and trial[0] not in self.told:
            self.on_trial = trial[0]

    told: set[int] = set()  # noqa: RUF012 - replaced with each worker: of whom it has told something

    @rule()
    def come(self) -> None:
        uid = len(self.losses) + 1
        self.losses[uid] = 0
        generation = self.books.add(uid)
        self.leases[uid] = Lease(generations=[generation], registry=self.books.registry, port=self.line)
        self.line.add([convert.add_request_msg(generation.request, uid=uid, arrival_ns=uid)])

    @precondition(lambda self: self._there())
    @rule(data=st.data())
    def a_token_comes(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from([generation.uid for generation in self._there()]))
        self.told = self.told | {uid}
        self.on_trial = None if uid == self.on_trial else self.on_trial
        self.books.dispatcher.apply(step([(uid, 97 + uid % 26)], started=[uid]))
        self._settle()

    @precondition(lambda self: self._there())
    @rule(data=st.data())
    def one_ends(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from([generation.uid for generation in self._there()]))
        self.told = self.told | {uid}
        self.on_trial = None if uid == self.on_trial else self.on_trial
        reason = EndingReason.CANCELLED if uid in self.unwanted else EndingReason.LENGTH
        self.books.dispatcher.apply(step(endings=[ending(uid, reason)]))
        self._settle()

    @precondition(lambda self: self.books.registry.num_live)
    @rule(data=st.data(), by_name=st.booleans())
    def one_is_given_up(self, data: st.DataObject, by_name: bool) -> None:
        """By a Cancel, or by a caller that leaves."""
        generation = data.draw(st.sampled_from(self.books.registry.all_live()))
        self.unwanted.add(generation.uid)
        if by_name:
            self.loop.call_soon(self.canceller.cancel, generation.request_id)
        else:
            self.loop.call_soon(self.leases[generation.uid].close)
        self._settle()

    @rule(data=st.data())
    def the_worker_is_lost(self, data: st.DataObject) -> None:
        there = [generation.uid for generation in self._there()]
        present = frozenset(data.draw(st.sets(st.sampled_from(there)))) if there else frozenset()
        blamed = frozenset({self.on_trial}) if self.on_trial in present else present
        lost, self.on_trial, self.told = self.worker, None, set()
        lost.present = present
        for uid in blamed:
            self.losses[uid] += 1
        before = {uid: self.books.registry.live(uid) for uid in blamed}
        self.loop.call_soon(lost.supervisor.lost.set_result, "killed")
        self._settle()
        assert self.worker is not lost
        for uid, generation in before.items():
            if self.losses[uid] >= MAX_LOSSES:
                assert generation is not None
                assert isinstance(generation.ending, ServiceError)
                assert generation.ending.reason is Reason.POISONED_REQUEST

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        added = self.worker.link.added
        assert added == sorted(set(added)), "sent twice, or overtaken"
        live = {generation.uid for generation in self.books.registry.all_live()}
        waiting = [uid for uid in sorted(live) if uid not in added]
        assert self.line.num_waiting == len(waiting), "somebody is lost"
        assert not waiting or self.on_trial is not None, "somebody waits for nothing"
        for uid in live & set(added) & self.unwanted:
            assert uid in self.worker.link.cancelled, "a worker computes what nobody wants"
        for uid in self.losses.keys() - live - self.unwanted:
            assert self.losses[uid] <= MAX_LOSSES
        assert all(self.losses[uid] < MAX_LOSSES for uid in live)


TestSuccessionAgainstModel = SuccessionAgainstModel.TestCase
TestSuccessionAgainstModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
