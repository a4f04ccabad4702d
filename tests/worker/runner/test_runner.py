"""The forward pass on pages against the untouched transformers model."""

import random

import msgspec
import pytest
import torch
from chairlift_worker.plan import RowPlan, StepPlan
from support.paged import MAX_BLOCKS, MAX_ROWS, Desk, some_ids
from support.tiny_models import CONFIGS, gemma2_config, generate_ids, reference_logits, tiny_model, write_model

BACKENDS = ("eager", "sdpa", "native")
PATHS = (*BACKENDS, "native, in place")  # the decode fast path where it can be
TOLERANCE = 1e-4


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_whole_prompt_has_the_models_own_logits(kind: str, backend: str, page_size: int) -> None:
    ids = some_ids(33)
    desk = Desk(tiny_model(kind), backend=backend, page_size=page_size)
    logits = desk.step(desk.sequence(ids).row(33))
    torch.testing.assert_close(logits[0], reference_logits(tiny_model(kind), ids)[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_chunks_of_any_size_have_the_models_own_logits(kind: str, backend: str, chunk: int) -> None:
    ids = some_ids(35, seed=1)
    desk = Desk(tiny_model(kind), backend=backend)
    sequence = desk.sequence(ids)
    expected = reference_logits(tiny_model(kind), ids)
    while sequence.computed < len(ids):
        logits = desk.step(sequence.row(min(chunk, len(ids) - sequence.computed)))
        torch.testing.assert_close(logits[0], expected[sequence.computed - 1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_rows_of_all_sorts_in_one_step_each_have_the_logits_of_their_sequence_alone(kind: str, backend: str) -> None:
    desk = Desk(tiny_model(kind), backend=backend, page_size=4, num_pages=200)
    lengths = (3, 90, 17, 33, 4, 5, 60, 25)  # contexts so different that one-token rows fall into several groups
    sequences = [desk.sequence(some_ids(length, seed=length)) for length in lengths]
    expected = {s.uid: reference_logits(tiny_model(kind), s.tokens.tolist()) for s in sequences}
    rng = random.Random(5)
    while active := [s for s in sequences if s.computed < len(s.tokens)]:
        rows = []
        for s in active:
            left = len(s.tokens) - s.computed
            rows.append(s.row(1 if left <= 2 or rng.random() < 0.2 else rng.randint(2, min(left - 1, 40))))
        rows.sort(key=lambda row: row.num_tokens != 1)
        logits = desk.step(*rows)
        for row, got in zip(rows, logits, strict=True):
            wanted = expected[row.uid][row.start + row.num_tokens - 1]
            torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", ["sdpa", "native", "native, in place"])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_greedy_decoding_on_pages_gives_the_ids_of_generate(kind: str, backend: str) -> None:
    prompt = some_ids(13, seed=2)
    expected = generate_ids(tiny_model(kind), prompt, 20)
    desk = Desk(tiny_model(kind), backend=backend)
    sequence = desk.sequence(prompt + [0] * 20)
    size, got = len(prompt), []
    for _ in range(20):
        logits = desk.step(sequence.row(size))
        got.append(int(logits[0].argmax()))
        sequence.tokens[sequence.computed] = got[-1]
        size = 1
    assert got == expected.ids


def test_batches_of_short_one_token_rows_alone_take_the_decode_fast_path() -> None:
    """It has room for MAX_ROWS rows of MAX_BLOCKS pages of 4 tokens."""
    desk = Desk(tiny_model("llama"), backend="native, in place", num_pages=200)
    longest = 4 * MAX_BLOCKS
    rows = [desk.sequence(some_ids(longest + 1, seed=seed)) for seed in range(MAX_ROWS + 1)]
    taken = desk.runner.steps_by_path
    desk.step(*(row.row(longest - 3) for row in rows))
    assert taken == {"varlen": 1}
    desk.step(*(row.row(1) for row in rows[:MAX_ROWS]))
    assert taken == {"varlen": 1, "decode": 1}
    desk.step(rows[0].row(1), rows[-1].row(2))  # not of one token
    desk.step(*(row.row(1) for row in rows))  # a row too many
    assert taken == {"varlen": 3, "decode": 1}
    desk.step(rows[1].row(1))  # the last token of the last page
    assert taken == {"varlen": 3, "decode": 2}
    logits = desk.step(rows[0].row(1), rows[2].row(1))  # one row has a page too many
    assert taken == {"varlen": 4, "decode": 2}
    expected = reference_logits(tiny_model("llama"), rows[0].tokens.tolist())[-1]
    torch.testing.assert_close(logits[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", [*BACKENDS, "decoder"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_rows_with_drafts_have_the_models_own_logits_at_their_last_token_and_at_each_draft(
    kind: str, backend: str
) -> None:
    desk = Desk(tiny_model(kind), backend=backend, num_pages=200)
    a, b, c, d = (desk.sequence(some_ids(30, seed=seed)) for seed in range(4))
    desk.step(a.row(12), b.row(20), c.row(7), d.row(9))
    rows = [c.row(1), a.row(5, num_drafts=4), d.row(6, sample=False), b.row(7, num_drafts=2)]
    logits = desk.step(*rows)
    expected = {s.uid: reference_logits(tiny_model(kind), s.tokens.tolist()) for s in (a, b, c)}
    wanted = [expected[c.uid][7:8], expected[a.uid][12:17], expected[b.uid][24:27]]
    torch.testing.assert_close(logits, torch.cat(wanted), atol=TOLERANCE, rtol=0)


def test_what_is_computed_over_drafts_taken_back_is_as_if_they_had_never_been() -> None:
    desk = Desk(tiny_model("llama"))
    ids, wrong = some_ids(30), some_ids(30, seed=1)
    sequence = desk.sequence([*ids[:12], *wrong[12:]])
    desk.step(sequence.row(11))
    desk.step(sequence.row(6, num_drafts=5))
    sequence.tokens[:] = sequence.tokens[:12] + desk.sequence(ids).tokens[12:]
    sequence.computed = 12
    logits = desk.step(sequence.row(18))
    torch.testing.assert_close(logits[0], reference_logits(tiny_model("llama"), ids)[-1], atol=TOLERANCE, rtol=0)


def test_drafts_behind_a_token_that_is_not_known_or_does_not_sample_are_refused() -> None:
    desk = Desk(tiny_model("llama"))
    for changes in ({"sample": None}, {"carry": True}, {"drafts": (1,) * 5}):
        row = msgspec.structs.replace(desk.sequence(some_ids(9)).row(5, num_drafts=2), **changes)
        with pytest.raises(ValueError, match="has drafts, but does not sample at a token that is known"):
            desk.step(row)


def test_only_rows_that_sample_reach_the_output_layer() -> None:
    desk = Desk(tiny_model("llama"))
    seen: list[torch.Size] = []
    hook = desk.model.module.lm_head.register_forward_hook(lambda _module, args, _out: seen.append(args[0].shape))
    a, b, c = (desk.sequence(some_ids(9, seed=seed)) for seed in range(3))
    desk.step(a.row(1), b.row(5, sample=False), c.row(9))
    hook.remove()
    assert [shape[:2] for shape in seen] == [(1, 2)]


def test_a_step_in_which_no_row_samples_gives_no_logits() -> None:
    desk = Desk(tiny_model("llama"))
    assert desk.step(desk.sequence(some_ids(9)).row(5, sample=False)).shape == (0, 384)


@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_row_does_not_see_its_neighbours(kind: str, backend: str) -> None:
    def logits_of_a(neighbour_seed: int) -> torch.Tensor:
        desk = Desk(tiny_model(kind), backend=backend)
        a, b, c = desk.sequence(some_ids(12)), desk.sequence(some_ids(20, seed=neighbour_seed)), desk.sequence([9] * 30)
        first = desk.step(a.row(11), b.row(13), c.row(29))[0]
        return torch.stack([first, desk.step(a.row(1), c.row(1), b.row(7))[0]])

    torch.testing.assert_close(logits_of_a(1), logits_of_a(2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", PATHS)
def test_a_neighbour_whose_numbers_are_broken_breaks_only_itself(backend: str) -> None:
    desk = Desk(tiny_model("llama"), backend=backend, num_pages=16)
    desk.runner.cache.sectors[:16] = float("nan")  # as if earlier requests had left them; the null one is nobody's
    a, b = desk.sequence(some_ids(5)), desk.sequence(some_ids(30, seed=1))
    desk.step(a.row(4, sample=False), b.row(29, sample=False))
    desk.runner.cache.sectors[b.tables[0][2]] = float("nan")
    logits = desk.step(a.row(1), b.row(1))
    expected = reference_logits(tiny_model("llama"), some_ids(5))[-1]
    torch.testing.assert_close(logits[0], expected, atol=TOLERANCE, rtol=0)
    assert logits[1].isnan().any()


def test_plain_calls_of_the_model_are_the_same_before_between_and_after_steps() -> None:
    desk = Desk(tiny_model("gemma2"))
    module, ids = desk.model.module, torch.tensor([some_ids(20)])
    before = module.config.to_dict(), module.config._attn_implementation
    with torch.inference_mode():
        plain = module(input_ids=ids, use_cache=False).logits
        desk.step(desk.sequence(some_ids(20)).row(20))
        between = module(input_ids=ids, use_cache=False).logits
        with pytest.raises(IndexError):
            desk.step(desk.sequence([10**6] * 5).row(5))  # the embedding raises in the middle of a step
        after = module(input_ids=ids, use_cache=False).logits
    assert torch.equal(plain, between)
    assert torch.equal(plain, after)
    assert (module.config.to_dict(), module.config._attn_implementation) == before


@pytest.mark.parametrize("backend", PATHS)
def test_gemma2_caps_hold_and_matter(backend: str, tmp_path) -> None:
    ids = some_ids(40, seed=3)
    logits = {}
    for cap in (2.0, 50.0):
        folder = write_model(tmp_path / str(cap), gemma2_config(attn_logit_softcapping=cap))
        desk = Desk(folder, backend=backend)
        sequence = desk.sequence(ids)
        rows = [desk.step(sequence.row(20)), *(desk.step(sequence.row(1)) for _ in range(20))]
        logits[cap] = torch.cat(rows)
        torch.testing.assert_close(logits[cap], reference_logits(folder, ids)[19:], atol=TOLERANCE, rtol=0)
        assert logits[cap].abs().max() <= 5.0
    assert (logits[2.0] - logits[50.0]).abs().max() > 0.01


def test_pages_may_be_given_before_their_tokens_come() -> None:
    ids = some_ids(9)
    desk = Desk(tiny_model("llama"))
    sequence = desk.sequence([*ids, *[5] * 20])
    logits = desk.step(sequence.row(9))
    torch.testing.assert_close(logits[0], reference_logits(tiny_model("llama"), ids)[-1], atol=TOLERANCE, rtol=0)


def test_the_owners_arrays_can_grow_after_a_step() -> None:
    desk = Desk(tiny_model("llama"))
    sequence = desk.sequence(some_ids(9))
    desk.step(sequence.row(9))
    sequence.tokens.append(1)  # BufferError if the step still held a view of it
    sequence.tables[0].append(1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda s: [], "without rows"),
        (lambda s: [s.row(3), s.row(1)], "rows with one token come before"),
        (lambda s: [s.row(0)], "no row is empty"),
        (lambda s: [s.row(10)], "runs to position 10 with 9 tokens"),
    ],
)
def test_a_plan_that_breaks_its_rules_is_refused(rows, message: str) -> None:
    desk = Desk(tiny_model("llama"))
    made: list[RowPlan] = rows(desk.sequence(some_ids(9)))
    with pytest.raises(ValueError, match=message):
        desk.runner.forward(StepPlan(step=1, rows=tuple(made)))


def test_what_the_model_raises_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tiny_model("llama"))

    def fail(*_args: object, **_keywords: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(desk.model.module.model, "forward", fail)
    with pytest.raises(MemoryError, match="no room"):
        desk.step(desk.sequence(some_ids(9)).row(9))


def test_times_of_building_and_of_the_forward_pass_are_told() -> None:
    desk = Desk(tiny_model("llama"))
    desk.step(desk.sequence(some_ids(9)).row(9))
    times = desk.runner.last_times
    assert 0 < times.build_ns < 10**10
    assert 0 < times.forward_ns < 10**10
