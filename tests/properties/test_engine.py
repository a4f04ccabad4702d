"""The whole engine, whatever the workload: each request gets what it would get alone.

`--workloads=N` draws N workloads, over all models, at random; without it the same USUAL ones are drawn each time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import tokenizers
import torch
from chairlift_service.text.detokenizer import Detokenizer
from chairlift_service.text.tokenizer import Tokenizer
from chairlift_worker.ipc.messages import NO_PROCESSORS, EndingReason, FlushedMsg, ProcessorsMsg
from chairlift_worker.swap.policy import NEVER_SWAP
from hypothesis import HealthCheck, given, settings
from support.engine import Outcome, Rig, loaded
from support.solo import Solo
from support.tiny_models import CONFIGS, tiny_model
from support.workloads import Job, Workload, play, workloads

USUAL = 210
MAX_PREEMPTIONS = 4
NEVER_CUT_SHORT = {EndingReason.STOP, EndingReason.LENGTH}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing by threads, and threads that wait for each other take time from everybody."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def all_seen() -> Iterator[Counter[str]]:
    """What all workloads came upon; fails where they were the usual number and never tried what they are to try."""
    seen = Counter[str]()
    yield seen
    print(dict(seen))
    if seen["workloads"] >= USUAL:
        kinds = {"swapped", "recomputed", "cancelled", "expired", "stopped", "sampled", "carried", "sharing"}
        kinds |= {
            "drafts that held",
            "drafts that did not",
            "cached tokens",
            "evicted though any two fit",
            "steps on the fast path",
            "graphs",
            "on lagging queues",
            "swapped on lagging queues",
            "carried on lagging queues",
            "carried, with processors",
            "drafts, with processors",
            "likeliest tokens",
            *ProcessorsMsg.__struct_fields__,
        }
        assert not [name for name in kinds if seen[name] < 5]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", CONFIGS)
def test_each_request_of_any_workload_gets_what_it_would_get_alone(
    kind: str, all_seen: Counter[str], request: pytest.FixtureRequest
) -> None:
    asked = request.config.getoption("--workloads")
    number = math.ceil((asked or USUAL) / len(CONFIGS))
    folder = tiny_model(kind)
    model, solo, seen = loaded(folder), Solo(folder), Counter[str]()

    @settings(
        max_examples=number,
        deadline=None,
        derandomize=not asked,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(workloads(model=model, name=kind, num_jobs=2000 if asked else 16))
    def every(workload: Workload) -> None:
        rig = play(workload, model, lambda job: solo.run(job).ids)
        for uid, job in enumerate(workload.jobs, start=1):
            solo.expect(job, rig.outcomes[uid], what=f"{kind}, request {uid}")
        check_endings(workload, rig)
        check_counters(workload, rig)
        check_text(kind, workload.jobs[0], rig.outcomes[1])
        rig.assert_idle()
        note(seen, workload, rig)

    began = time.monotonic()
    every()
    print(
        f"{kind}: {time.monotonic() - began:.0f} s, {solo.num_generated} beside generate, "
        f"{solo.comparisons.num_ties} ties, {solo.num_cut_offs} at a cut-off, {dict(seen)}"
    )
    solo.comparisons.check_ties()
    assert seen["workloads"] >= number
    all_seen.update(seen)


def check_endings(workload: Workload, rig: Rig) -> None:
    """Reasons, usage, and how often a request had to give way."""
    for uid, job in enumerate(workload.jobs, start=1):
        outcome = rig.outcomes[uid]
        ending, started = outcome.ending, outcome.started
        assert ending is not None
        assert not ending.error
        assert ending.cached_tokens == (started.cached_tokens if started else ending.cached_tokens)
        assert ending.cached_tokens < len(job.prompt), "a token is always left to compute"
        assert ending.cached_tokens % rig.layout.groups[0].sector_len == 0
        assert workload.shape.sharing or not ending.cached_tokens
        assert ending.reason in NEVER_CUT_SHORT or job.cancelled is not None or job.patience is not None
        assert (ending.reason is EndingReason.CANCELLED) <= (job.cancelled is not None)
        assert (ending.reason is EndingReason.DEADLINE) <= (job.patience is not None)
        assert (ending.swapped_ns > 0) <= (ending.preemptions > 0)
        if workload.fits_pairwise(rig.layout):
            assert ending.preemptions <= MAX_PREEMPTIONS, f"request {uid} was preempted {ending.preemptions} times"


def check_counters(workload: Workload, rig: Rig) -> None:
    """The figures that operators see agree with what the callers were told, and no work was done without end."""
    counters, outcomes = rig.roster.counters, rig.outcomes
    endings = [outcome.ending for outcome in outcomes.values() if outcome.ending]
    limits = workload.shape.limits
    assert counters.generated_tokens == sum(len(outcome.ids) for outcome in outcomes.values())
    assert counters.preemptions_swap + counters.preemptions_recompute == sum(end.preemptions for end in endings)
    if workload.shape.costs is NEVER_SWAP or not workload.shape.swap_slots:
        assert counters.preemptions_swap == 0
    for plan in rig.executor.plans:
        assert 1 <= len(plan.rows) <= limits.max_requests_per_batch
        assert len(plan.rows) <= plan.num_tokens <= limits.max_batch_tokens
        assert all(1 <= row.num_tokens <= limits.max_prefill_chunk for row in plan.rows)
    assert counters.computed_tokens == sum(plan.num_tokens for plan in rig.executor.plans)
    depth = workload.shape.depth
    bound = sum(
        (1 + end.preemptions) * (len(job.prompt) + len(outcomes[uid].ids) + depth)
        for (uid, job), end in zip(enumerate(workload.jobs, start=1), endings, strict=True)
    )
    taken_back = counters.draft_tokens - counters.accepted_draft_tokens
    assert counters.draft_tokens == sum(len(row.drafts) for plan in rig.executor.plans for row in plan.rows)
    assert 0 <= counters.accepted_draft_tokens <= counters.draft_tokens
    assert counters.computed_tokens - taken_back <= bound, "more was computed than every eviction can explain"
    if depth == 1 and all(end.reason in NEVER_CUT_SHORT and not end.preemptions for end in endings):
        needed = sum(len(job.prompt) + len(outcomes[uid].ids) - 1 for uid, job in enumerate(workload.jobs, start=1))
        cached = sum(end.cached_tokens for end in endings)
        assert counters.computed_tokens - taken_back == needed - cached, "each token once"
        assert counters.prompt_tokens == sum(len(job.prompt) for job in workload.jobs)
        assert counters.cached_prompt_tokens == cached
    assert sum(isinstance(answer, FlushedMsg) for answer in rig.answers) == len(workload.flushes)


def check_text(kind: str, job: Job, outcome: Outcome) -> None:
    """The service's text of the tokens, in the pieces in which they came, is the library's text of the whole."""
    library = tokenizers.Tokenizer.from_file(str(tiny_model(kind) / "tokenizer.json"))
    backend = tokenizers.Tokenizer.from_file(str(tiny_model(kind) / "tokenizer.json"))
    detokenizer = Detokenizer(tokenizer=Tokenizer(backend=backend), prompt_ids=job.prompt, skip_special_tokens=True)
    text = "".join([*map(detokenizer.push, outcome.ids), detokenizer.finish()])
    whole, before = library.decode([*job.prompt, *outcome.ids]), library.decode(list(job.prompt))
    if not whole.startswith(before):  # the prompt ends inside a character, which the output completes
        assert before.endswith("\ufffd")
        before = before[:-1]
    assert whole == before + text


def note(seen: Counter[str], workload: Workload, rig: Rig) -> None:
    """Counts what happened, so that the test can tell that it tried what it is about."""
    counters, shape = rig.roster.counters, workload.shape
    endings = [outcome.ending for outcome in rig.outcomes.values() if outcome.ending]
    seen["workloads"] += 1
    seen["requests"] += len(endings)
    seen["steps"] += len(rig.executor.plans)
    seen["swapped"] += counters.preemptions_swap
    seen["recomputed"] += counters.preemptions_recompute
    seen["cached tokens"] += counters.cached_prompt_tokens
    seen["cancelled"] += sum(end.reason is EndingReason.CANCELLED for end in endings)
    seen["expired"] += sum(end.reason is EndingReason.DEADLINE for end in endings)
    seen["stopped"] += sum(end.reason is EndingReason.STOP for end in endings)
    seen["sampled"] += sum(job.sampling.temperature > 0 for job in workload.jobs)
    seen["graphs"] += rig.num_graphs
    seen["steps on the fast path"] += rig.runner.steps_by_path["decode"]
    asked = [row for plan in rig.executor.plans for row in plan.rows if row.sample and row.sample.processors]
    seen["carried, with processors"] += sum(row.carry for row in asked)
    seen["drafts, with processors"] += sum(len(row.drafts) for row in asked)
    seen["likeliest tokens"] += sum(bool(top) for outcome in rig.outcomes.values() for top in outcome.tops)
    for processors in [job.sampling.processors for job in workload.jobs if job.sampling.processors]:
        for name, value in msgspec.structs.asdict(processors).items():
            seen[name] += value != getattr(NO_PROCESSORS, name)
    seen["carried"] += sum(row.carry for plan in rig.executor.plans for row in plan.rows)
    seen["drafts that held"] += counters.accepted_draft_tokens
    seen["drafts that did not"] += counters.draft_tokens - counters.accepted_draft_tokens
    if shape.lag is not None:
        seen["on lagging queues"] += 1
        seen["swapped on lagging queues"] += counters.preemptions_swap
        seen["carried on lagging queues"] += sum(row.carry for plan in rig.executor.plans for row in plan.rows)
    seen["sharing"] += shape.sharing
    seen["evicted though any two fit"] += workload.fits_pairwise(rig.layout) and any(end.preemptions for end in endings)
    for end in endings:
        seen[f"preempted {end.preemptions} times"] += 1
