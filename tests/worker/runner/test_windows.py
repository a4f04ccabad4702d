"""Models with sliding layers, whose pages go back as the window moves, against the untouched transformers model."""

from pathlib import Path

import pytest
import torch
from support.paged import Desk, some_ids
from support.tiny_models import gemma3_config, reference_logits, tiny_model, write_model

BACKENDS = ("eager", "sdpa", "native")
WINDOW = 10  # of all the tiny models with sliding layers
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
TOLERANCE = 1e-4
DEEP = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]


@pytest.fixture(scope="module", params=["mistral", "gemma2", "gemma3", "gemma3 of 7 layers"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last one has 5 sliding layers and 2 full ones, so that a sector is cut into several blocks."""
    if request.param in {"mistral", "gemma2", "gemma3"}:
        return tiny_model(request.param)
    config = gemma3_config(num_hidden_layers=len(DEEP), layer_types=DEEP)
    return write_model(tmp_path_factory.mktemp("deep") / "model", config)


@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_at_the_windows_edge_and_what_follows_have_the_models_own_logits(
    folder: Path, backend: str, chunk: int
) -> None:
    """After every step what the windows have left behind is taken away and overwritten with NaN."""
    for page_size in (3, 16):
        desk = Desk(folder, backend=backend, page_size=page_size, num_pages=160)
        for length in LENGTHS:
            ids = some_ids(length + 6, seed=length)
            expected = reference_logits(folder, ids)
            sequence = desk.sequence(ids)
            while sequence.computed < len(ids):
                left = length - sequence.computed
                logits = desk.step(sequence.row(min(chunk, left) if left > 0 else 1))
                torch.testing.assert_close(logits[0], expected[sequence.computed - 1], atol=TOLERANCE, rtol=0)
                desk.forget(sequence)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_whose_windows_stand_at_different_places_each_have_their_own_logits(folder: Path, backend: str) -> None:
    desk = Desk(folder, backend=backend, page_size=4, num_pages=200)
    sequences = [desk.sequence(some_ids(length + 12, seed=length)) for length in (1, 9, 10, 11, 14, 31, 90)]
    expected = {s.uid: reference_logits(folder, s.tokens.tolist()) for s in sequences}
    for s in sequences:
        desk.step(s.row(len(s.tokens) - 12))
        desk.forget(s)
    for sizes in [(1,) * 7, (1, 1, 1, 1, 5, 3, 2), (1,) * 7]:
        rows = [s.row(size) for s, size in zip(sequences, sizes, strict=True)]
        logits = desk.step(*rows)
        for row, got in zip(rows, logits, strict=True):
            wanted = expected[row.uid][row.start + row.num_tokens - 1]
            torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
        for s in sequences:
            desk.forget(s)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_would_look_at_what_was_given_back_is_refused(backend: str) -> None:
    desk = Desk(tiny_model("mistral"), backend=backend, page_size=4)
    for size in (1, 5):
        sequence = desk.sequence(some_ids(40))
        desk.step(sequence.row(30))
        desk.forget(sequence)
        sequence.tables[0][5] = -1  # holds positions 20 to 23; the next token sees 21
        with pytest.raises(ValueError, match=f"row {sequence.uid} sees sectors 5 to "):
            desk.step(sequence.row(size))


def test_what_a_layer_reads_is_bounded_by_its_window() -> None:
    desk = Desk(tiny_model("gemma3"), page_size=4, num_pages=200)
    seen: dict[int | None, set[int]] = {None: set(), WINDOW: set()}
    attend = desk.runner._forward._backend.attend

    def watched(call, cache, metadata):
        seen[metadata.window] |= {group.context_slots.shape[1] for group in metadata.groups}
        seen[metadata.window] |= {len(span.context_slots) for span in metadata.spans}
        return attend(call, cache, metadata)

    desk.runner._forward._backend.attend = watched
    sequence = desk.sequence(some_ids(200))
    desk.step(sequence.row(190))
    desk.step(sequence.row(5))
    desk.step(sequence.row(1))
    assert seen == {None: {190, 195, 196}, WINDOW: {190, WINDOW - 1 + 5, WINDOW}}
