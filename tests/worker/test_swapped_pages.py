"""Evicted requests' pages over the real cache, mover and model: the same bytes come back, in other places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from chairlift_worker.ipc.messages import EndingReason, PauseMsg, ShutdownMsg
from chairlift_worker.kv.layout import KvCacheType
from chairlift_worker.request import Request
from support.engine import LIMITS, Rig, Shape, loaded
from support.solo import Solo
from support.tiny_models import tiny_model
from support.workloads import Job, random_ids

PAGE_SIZE = 4
CHUNK = 8
# Three that fit alone and not together: 7 pages in the end, and with windows as many sectors as that takes.
JOBS = [Job(prompt=random_ids(6 + number, 900 + number), max_new_tokens=22 - number) for number in range(3)]
Stored = dict[tuple[int, int], torch.Tensor]  # by layer and position: key and value


def crowded(
    kind: str,
    *,
    spare: float = 0.5,
    sharing: bool = False,
    pool_of: int = 10,
    depth: int = 1,
    kv_cache: KvCacheType = "auto",
) -> Rig:
    """A cache for one of the requests and a bit, a pool for `pool_of`, and the requests in it."""
    model = loaded(tiny_model(kind))
    layout = Shape(page_size=PAGE_SIZE, kv_cache=kv_cache).layout(model)
    one = layout.peak(0, JOBS[0].max_total, CHUNK)
    shape = Shape(
        num_sectors=int(one * (1 + spare)),
        page_size=PAGE_SIZE,
        sharing=sharing,
        swap_slots=pool_of * one,
        depth=depth,
        kv_cache=kv_cache,
    )
    rig = Rig(model, replace(shape, limits=replace(LIMITS, max_prefill_chunk=CHUNK)))
    for uid, job in enumerate(JOBS, start=1):
        rig.add(job.message(uid))
    return rig


def contents(rig: Rig, request: Request) -> Stored:
    """Keys and values of each layer at the positions that the request has computed and may look at again.

    Found through the page tables by the layout's definition: position p of a group is the token p % sector_len of
    sector p // sector_len.
    """
    stored: Stored = {}
    for number, group in enumerate(rig.layout.groups):
        first = group.first_needed(request.computed) * group.sector_len
        for position in range(first, request.computed):
            sector = request.table.sectors[number][position // group.sector_len]
            block, place = divmod(position % group.sector_len, rig.layout.page_size)
            slot = sector * rig.layout.sector_slots(group) + block * rig.layout.block_slots(group) + place
            for layer in group.layers:
                cache = rig.runner.cache
                stored[layer, position] = torch.stack([cache.slot_keys(layer)[slot], cache.slot_values(layer)[slot]])
    return stored


class Witness:
    """Remembers what evicted requests had, and compares when they are back."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.half_filled = self.moved = self.compared = 0
        self._before: dict[int, tuple[list[list[int]], Stored]] = {}

    def turn(self) -> None:
        rig = self.rig
        active = [request for request in rig.roster.active.values() if request.computed]
        held = {request.uid: (tables_of(request), contents(rig, request)) for request in active}
        rig.turn()
        for request in active:
            if request.saved:
                self._before[request.uid] = held[request.uid]
                self.half_filled += request.saved.computed % PAGE_SIZE != 0
        for uid in self._before.keys() & rig.roster.active.keys():
            self._compare(rig.roster.active[uid], *self._before.pop(uid))

    def _compare(self, request: Request, tables: list[list[int]], before: Stored) -> None:
        now = contents(self.rig, request)
        common = before.keys() & now.keys()
        assert {layer for layer, _ in common} == {layer for layer, _ in before}, "of every layer"
        for place in common:
            assert torch.equal(before[place].view(torch.int32), now[place].view(torch.int32)), f"layer, token {place}"
        self.compared += 1
        self.moved += any(
            old[: len(new)] != new[: len(old)] for old, new in zip(tables, tables_of(request), strict=True)
        )


def tables_of(request: Request) -> list[list[int]]:
    return [sectors.tolist() for sectors in request.table.sectors]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2", "gemma3"])
def test_every_layers_keys_and_values_come_back_byte_for_byte_in_other_pages(kind: str) -> None:
    solo = Solo(tiny_model(kind))
    compared = half_filled = moved = 0
    for spare in (0.0, 0.25, 0.5, 0.75):
        witness = Witness(crowded(kind, spare=spare))
        rig = witness.rig
        while not rig.executor.plans or rig.roster.waiting or rig.roster.active:
            witness.turn()
        for uid, job in enumerate(JOBS, start=1):
            solo.expect(job, rig.outcomes[uid], what=f"{kind}, request {uid}")
        rig.assert_idle()
        compared, moved = compared + witness.compared, moved + witness.moved
        half_filled += witness.half_filled
    assert min(compared, half_filled, moved) >= 2


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_in_int8_numbers_and_scales_come_back_and_the_outputs_are_those_of_a_cache_with_room(kind: str) -> None:
    witness = Witness(crowded(kind, kv_cache="int8"))
    rig, roomy = witness.rig, crowded(kind, spare=9, kv_cache="int8")
    assert rig.runner.cache.sectors.dtype == torch.int8
    while not rig.executor.plans or rig.roster.waiting or rig.roster.active:
        witness.turn()
    roomy.run()
    assert min(witness.compared, witness.moved) >= 1
    assert roomy.roster.counters.preemptions_swap == 0
    for uid in range(1, len(JOBS) + 1):
        assert rig.outcomes[uid].ids == roomy.outcomes[uid].ids
    rig.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("pool_of", [0, 1, 2])
def test_a_pool_of_no_one_and_two_requests(pool_of: int, sharing: bool, depth: int) -> None:
    rig = crowded("llama", sharing=sharing, pool_of=pool_of, depth=depth)
    rig.run()
    rig.close()
    counters = rig.roster.counters
    assert counters.preemptions_swap + counters.preemptions_recompute >= 1
    assert bool(counters.preemptions_swap) == bool(pool_of)
    solo = Solo(tiny_model("llama"))
    for uid, job in enumerate(JOBS, start=1):
        solo.expect(job, rig.outcomes[uid], what=f"request {uid}")
    rig.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_cancelled_while_swapped_leaves_nothing_and_disturbs_nobody(depth: int) -> None:
    rig = crowded("llama", depth=depth)
    while not rig.roster.num_swapped:
        rig.turn()
    (swapped,) = [uid for uid in (1, 2, 3) if rig.roster.get(uid).saved]
    rig.cancel(swapped)
    rig.turn()
    assert rig.swap.pool.num_used == 0
    rig.run()
    rig.close()
    assert rig.outcomes[swapped].ending.reason is EndingReason.CANCELLED
    solo = Solo(tiny_model("llama"))
    for uid, job in enumerate(JOBS, start=1):
        solo.expect(job, rig.outcomes[uid], what=f"request {uid}")
    rig.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_worker_stops_while_requests_are_swapped(depth: int) -> None:
    rig = crowded("llama", depth=depth)
    while not rig.roster.num_swapped:
        rig.turn()
    rig.send(PauseMsg(op=1))
    rig.send(ShutdownMsg())
    rig.channel.wait_for_request = lambda timeout_s: True
    rig.engine.run()  # returns: nothing waits for a step, or for slots of the pool
    rig.close()
    rig.roster.check()
    assert len(rig.pipeline) == 0
