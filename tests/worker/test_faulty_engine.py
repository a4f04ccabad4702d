"""The whole engine over a real model, with requests that fail: each neighbour gets what it would get alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chairlift_worker.attention.native_kernel import Isa
from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.speculation.speculator import DraftLimits
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from support.engine import LIMITS, Rig, Shape, loaded
from support.solo import Solo
from support.tiny_models import FULL_ATTENTION, tiny_model
from support.workloads import Job, captured, random_ids

SICK_ID = 383  # a token whose embedding is no number
CHUNKED = replace(LIMITS, max_prefill_chunk=6)
DRAFTS = DraftLimits(num_tokens=3, min_len=1, max_len=3)
ROOMY = Shape(limits=CHUNKED, num_sectors=256)
SHAPES = {
    "native attention": ROOMY,
    "sdpa": replace(ROOMY, backend="sdpa"),
    "eager": replace(ROOMY, backend="eager"),
    "decode fast path": replace(ROOMY, max_blocks_per_request=64),
    "graphs": replace(ROOMY, max_blocks_per_request=64, passes=captured(varlen=True, decode=True)),
    "native decoder": replace(ROOMY, isa=Isa.BEST),
    "portable decoder": replace(ROOMY, isa=Isa.PORTABLE),
    "async": replace(ROOMY, depth=2),
    "async decoder": replace(ROOMY, depth=2, isa=Isa.BEST),
    "drafts": replace(ROOMY, drafts=DRAFTS),
    "drafts on sdpa": replace(ROOMY, drafts=DRAFTS, backend="sdpa"),
    "drafts on the decoder": replace(ROOMY, drafts=DRAFTS, isa=Isa.BEST),
    "sharing": replace(ROOMY, sharing=True),
    "sharing, async": replace(ROOMY, sharing=True, depth=2),
    "little memory": replace(ROOMY, num_sectors=24),
    "little memory, async": replace(ROOMY, num_sectors=24, depth=2, swap_slots=60),
    "little memory, swapping": replace(ROOMY, num_sectors=24, swap_slots=60, sharing=True),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())

PREFIX = random_ids(13, 1)
# Texts that repeat themselves, so that there are drafts.
NEIGHBOURS = {
    uid: Job(prompt=(*PREFIX[: 4 * uid % 13], *random_ids(3, uid) * 4), max_new_tokens=20) for uid in range(1, 5)
}


@pytest.fixture(scope="module")
def sick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untied Llama, whose embedding of one token is no number: what it computes of that token is none either."""
    folder = tmp_path_factory.mktemp("sick") / "llama"
    folder.mkdir()
    for path in tiny_model("untied").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][SICK_ID] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def solos() -> dict[str, Solo]:
    return {kind: Solo(tiny_model(kind)) for kind in ("untied", "llama", "gemma3")}


def run_to_the_end(rig: Rig) -> None:
    try:
        rig.run()
    finally:
        rig.close()
    rig.assert_idle()


def expect_neighbours(rig: Rig, solo: Solo, jobs: dict[int, Job]) -> None:
    for uid, job in jobs.items():
        solo.expect(job, rig.outcomes[uid], what=f"request {uid}")
        ending = rig.outcomes[uid].ending
        assert ending is not None
        assert ending.reason is EndingReason.LENGTH


@EVERY_SHAPE
def test_what_is_no_number_stays_in_its_request(sick_model: Path, solos: dict[str, Solo], shape: Shape) -> None:
    """The sick token's keys and values are none either: they lie in pages that others get afterwards."""
    rig = Rig(loaded(sick_model), shape)
    sick = {
        10: Job(prompt=(SICK_ID,), max_new_tokens=9),
        11: Job(prompt=(*PREFIX, *random_ids(9, 7), SICK_ID), max_new_tokens=9),
        12: Job(prompt=(*PREFIX, SICK_ID, *random_ids(20, 8)), max_new_tokens=9),
    }
    for uid, job in {**sick, **NEIGHBOURS}.items():
        rig.add(job.message(uid))
        rig.turn()
    again = {uid + 20: job for uid, job in NEIGHBOURS.items()}
    for uid, job in again.items():
        rig.add(job.message(uid))
    run_to_the_end(rig)
    for uid in sick:
        ending = rig.outcomes[uid].ending
        assert ending is not None
        assert (ending.reason, ending.error) == (
            EndingReason.ERROR,
            "NUMERICAL_ERROR: the logits of token 0 are not finite numbers.",
        )
        assert rig.outcomes[uid].ids == []
    expect_neighbours(rig, solos["untied"], {**NEIGHBOURS, **again})


@EVERY_SHAPE
@pytest.mark.parametrize("at", ["first", "sixth"])
@pytest.mark.parametrize("kind", ["sample", "nan"])
def test_a_request_that_fails_has_its_tokens_so_far_and_its_neighbours_all_of_theirs(
    solos: dict[str, Solo], kind: str, at: str, shape: Shape
) -> None:
    index = {"first": 0, "sixth": 5}[at]
    rig = Rig(loaded(tiny_model("untied")), shape, faults=f"{kind}:2:{index}")
    for uid, job in NEIGHBOURS.items():
        rig.add(job.message(uid))
    run_to_the_end(rig)
    failed = rig.outcomes[2]
    assert failed.ids == solos["untied"].run(NEIGHBOURS[2].alone()).ids[:index]
    assert failed.ending is not None
    assert failed.ending.reason is EndingReason.ERROR
    reason, _, sentence = failed.ending.error.partition(": ")
    assert reason == {"sample": "POISONED_REQUEST", "nan": "NUMERICAL_ERROR"}[kind]
    assert sentence
    expect_neighbours(rig, solos["untied"], {uid: job for uid, job in NEIGHBOURS.items() if uid != 2})


@EVERY_SHAPE
@pytest.mark.parametrize("fault", ["memory:3,alloc:9", "memory:2:2,memory:5:2"])
def test_a_step_that_finds_no_memory_costs_nobody_anything(solos: dict[str, Solo], fault: str, shape: Shape) -> None:
    rig = Rig(loaded(tiny_model("untied")), shape, faults=fault)
    with capture_logs() as logs:
        for uid, job in NEIGHBOURS.items():
            rig.add(job.message(uid))
        run_to_the_end(rig)
    assert [entry["log_level"] for entry in logs][:1] == ["warning"]
    assert len(logs) <= 2
    expect_neighbours(rig, solos["untied"], NEIGHBOURS)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("depth", [1, 2])
def test_models_with_windows_are_computed_in_pieces_too(solos: dict[str, Solo], kind: str, depth: int) -> None:
    rig = Rig(loaded(tiny_model(kind)), replace(ROOMY, depth=depth), faults="memory:1,memory:7:2")
    for uid, job in NEIGHBOURS.items():
        rig.add(job.message(uid))
    run_to_the_end(rig)
    expect_neighbours(rig, solos[kind], NEIGHBOURS)


@EVERY_SHAPE
@pytest.mark.parametrize("step", [2, 9])
def test_where_there_is_no_memory_at_all_the_steps_requests_fail_and_the_engine_goes_on(
    solos: dict[str, Solo], shape: Shape, step: int
) -> None:
    rig = Rig(loaded(tiny_model("untied")), shape, faults=f"memory:{step}:1000")
    for uid, job in NEIGHBOURS.items():
        rig.add(job.message(uid))
    while len(rig.executor.plans) < step:
        rig.turn()
    (failing,) = [plan for plan in rig.executor.plans if plan.step == step]
    failed = {row.uid for row in failing.rows}
    again = {uid + 20: job for uid, job in NEIGHBOURS.items()}
    for uid, job in again.items():
        rig.add(job.message(uid))
    run_to_the_end(rig)
    assert failed
    for uid in failed & NEIGHBOURS.keys():
        ending = rig.outcomes[uid].ending
        assert ending is not None
        assert ending.error == "INTERNAL: there was not enough memory to compute this request."
        alone = solos["untied"].run(NEIGHBOURS[uid].alone()).ids
        assert rig.outcomes[uid].ids == alone[: len(rig.outcomes[uid].ids)]
    unhurt = {uid: job for uid, job in {**NEIGHBOURS, **again}.items() if uid not in failed}
    expect_neighbours(rig, solos["untied"], unhurt)


@pytest.mark.parametrize("shape", [ROOMY, replace(ROOMY, depth=2)], ids=["one step", "two steps"])
def test_whatever_else_a_forward_pass_raises_ends_the_engine(shape: Shape) -> None:
    rig = Rig(loaded(tiny_model("untied")), shape, faults="forward:4")
    rig.add(NEIGHBOURS[1].message(1))
    with pytest.raises(Exception, match="made to fail: forward:4"):
        rig.run()
    rig.close()


def test_every_model_of_full_attention_forgets_a_failed_prefix() -> None:
    for kind in FULL_ATTENTION:
        rig = Rig(loaded(tiny_model(kind)), replace(ROOMY, sharing=True), faults="nan:1:3")
        job = Job(prompt=random_ids(18, 3), max_new_tokens=6)
        for uid in (1, 2, 3):
            rig.add(job.message(uid))
            rig.run()
        assert [rig.outcomes[uid].started.cached_tokens for uid in (1, 2, 3)] == [0, 0, 16]
        assert rig.outcomes[2].ids == rig.outcomes[3].ids
        rig.assert_idle()
        rig.close()
