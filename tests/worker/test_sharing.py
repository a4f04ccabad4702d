"""A prefix that many requests share is computed once, over a real model and the real engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine import LIMITS, Rig, Shape, loaded
from support.solo import Solo
from support.tiny_models import llama_config, write_model
from support.workloads import Job, random_ids

NUM_REQUESTS = 32
PREFIX_LEN = 512
NEW_TOKENS = 4
PREFIX = random_ids(PREFIX_LEN, 5)
JOBS = [Job(prompt=(*PREFIX, 4 + number), max_new_tokens=NEW_TOKENS) for number in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return write_model(tmp_path_factory.mktemp("long") / "llama", llama_config(max_position_embeddings=1024))


def rig_of(folder, *, sharing: bool, depth: int) -> Rig:
    limits = replace(LIMITS, max_batch_tokens=256, max_prefill_chunk=128, max_requests_per_batch=NUM_REQUESTS)
    shape = Shape(num_sectors=1200, page_size=16, sharing=sharing, depth=depth, limits=limits)
    return Rig(loaded(folder), shape)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("together", [True, False])
def test_a_prefix_of_512_tokens_behind_32_requests_is_computed_once(folder, together: bool, depth: int) -> None:
    rig = rig_of(folder, sharing=True, depth=depth)
    for uid, job in enumerate(JOBS, start=1):
        rig.add(job.message(uid))
        if not together:
            rig.turn()
    rig.run()
    rig.close()
    counters = rig.roster.counters
    own_tokens = NUM_REQUESTS * (1 + NEW_TOKENS - 1)  # the prompt's last, and all generated ones but the last
    in_vain = 0 if depth == 1 else NUM_REQUESTS  # a row planned before the last token was known: none, or one each
    assert PREFIX_LEN + own_tokens <= counters.computed_tokens <= PREFIX_LEN + own_tokens + in_vain
    assert counters.cached_prompt_tokens == (NUM_REQUESTS - 1) * PREFIX_LEN
    assert counters.prompt_tokens == NUM_REQUESTS * (PREFIX_LEN + 1)
    cached = sorted(outcome.ending.cached_tokens for outcome in rig.outcomes.values() if outcome.ending)
    assert cached == [0] + [PREFIX_LEN] * (NUM_REQUESTS - 1)
    solo = Solo(folder)
    for uid in (1, 2, NUM_REQUESTS):
        solo.expect(JOBS[uid - 1], rig.outcomes[uid], what=f"request {uid}")
    rig.assert_idle()


def test_without_sharing_each_computes_it(folder) -> None:
    rig = rig_of(folder, sharing=False, depth=1)
    for uid, job in enumerate(JOBS[:4], start=1):
        rig.add(job.message(uid))
    rig.run()
    assert rig.roster.counters.computed_tokens == 4 * (PREFIX_LEN + NEW_TOKENS)
