"""The native decoder against the untouched transformers model."""

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
from chairlift_worker.attention.native_kernel import Isa, isas
from chairlift_worker.decoder.recipe import recipe_fault
from support.paged import Desk, some_ids
from support.tiny_models import CONFIGS, generate_ids, reference_logits, tiny_model, write_model
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, SmolLM3Config

SHAPE = {"vocab_size": 384, "num_hidden_layers": 2, "max_position_embeddings": 512, "initializer_range": 0.35}
HEADS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
# Sizes that fill neither blocks of 16 outputs nor groups of 32 inputs.
ODD = {"hidden_size": 42, "intermediate_size": 51, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
MORE: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE, **HEADS),  # biases
    "smollm3": SmolLM3Config(**SHAPE, **HEADS, no_rope_layers=[1, 0], pad_token_id=3),  # a layer without positions
    "odd": LlamaConfig(**{**SHAPE, "vocab_size": 391}, **ODD, tie_word_embeddings=True),
    "biases": LlamaConfig(**SHAPE, **HEADS, attention_bias=True),
    "yarn": LlamaConfig(**SHAPE, **HEADS, rope_parameters=YARN),
    "llama3": LlamaConfig(**SHAPE, **HEADS, rope_parameters=LLAMA3),
}
KINDS = ("llama", "untied", "qwen3", "mistral", "gemma2", "gemma3", *MORE)
WINDOWED = {"mistral", "gemma2", "gemma3"}
ISAS = tuple(f"decoder {isa.name}" for isa in isas())
TOLERANCE = 1e-4


@functools.cache
def folder_of(kind: str) -> Path:
    if kind in CONFIGS:
        return tiny_model(kind)
    folder = Path(tempfile.mkdtemp()) / "model"
    return write_model(folder, MORE[kind])


@pytest.mark.parametrize("chunk", [1, 7, 35])
@pytest.mark.parametrize("backend", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_size_have_the_models_own_logits(kind: str, backend: str, chunk: int) -> None:
    ids = some_ids(35, seed=1)
    desk = Desk(folder_of(kind), backend=backend)
    assert recipe_fault(desk.model.module, desk.model.attention_options) is None
    sequence = desk.sequence(ids)
    expected = reference_logits(folder_of(kind), ids)
    while sequence.computed < len(ids):
        logits = desk.step(sequence.row(min(chunk, len(ids) - sequence.computed)))
        torch.testing.assert_close(logits[0], expected[sequence.computed - 1], atol=TOLERANCE, rtol=0)
        if kind in WINDOWED:
            desk.forget(sequence)


@pytest.mark.parametrize("backend", [*ISAS, "decoder, in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_all_sorts_in_one_step_each_have_the_logits_of_their_sequence_alone(kind: str, backend: str) -> None:
    desk = Desk(folder_of(kind), backend=backend, page_size=4, num_pages=200)
    sequences = [desk.sequence(some_ids(length, seed=length)) for length in (3, 90, 17, 33, 4, 5, 60, 25)]
    expected = {s.uid: reference_logits(folder_of(kind), s.tokens.tolist()) for s in sequences}
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


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_gives_the_ids_of_generate(kind: str) -> None:
    prompt = some_ids(13, seed=2)
    expected = generate_ids(folder_of(kind), prompt, 20)
    desk = Desk(folder_of(kind), backend="decoder, in place")
    sequence = desk.sequence(prompt + [0] * 20)
    size, got = len(prompt), []
    for _ in range(20):
        got.append(int(desk.step(sequence.row(size))[0].argmax()))
        sequence.tokens[sequence.computed] = got[-1]
        size = 1
    assert got == expected.ids


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_the_number_of_threads_changes_nothing(num_threads: int) -> None:
    def logits_of(threads: int) -> list[torch.Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            desk = Desk(folder_of("llama"), backend="decoder", num_pages=600)
            rows = [
                desk.sequence(some_ids(length, seed=length)) for length in range(3, 39)
            ]  # so much that all are used
            first = desk.step(*(row.row(len(row.tokens) - 1) for row in rows))
            return [first, desk.step(*(row.row(1) for row in rows)), desk.step(desk.sequence(some_ids(2)).row(1))]
        finally:
            torch.set_num_threads(before)

    for got, wanted in zip(logits_of(num_threads), logits_of(4), strict=True):
        assert torch.equal(got, wanted)


def test_a_step_in_which_no_row_samples_gives_no_logits() -> None:
    desk = Desk(folder_of("llama"), backend="decoder")
    assert desk.step(desk.sequence(some_ids(9)).row(5, sample=False)).shape == (0, 384)


def test_a_token_outside_the_vocabulary_and_a_missing_page_are_refused_before_anything_is_written() -> None:
    desk = Desk(folder_of("llama"), backend="decoder")
    before = desk.runner.cache.sectors.clone()
    strange = desk.sequence([1, 2, 384])
    with pytest.raises(ValueError, match="a token or layer that does not exist"):
        desk.step(strange.row(3))
    homeless = desk.sequence(some_ids(9))
    homeless.tables[0][1] = 10_000
    with pytest.raises(ValueError, match="points outside the cache"):
        desk.step(homeless.row(9))
    assert torch.equal(desk.runner.cache.sectors, before)


def test_an_instruction_set_that_the_machine_lacks_is_refused() -> None:
    lacking = [isa for isa in Isa if isa is not Isa.BEST and isa not in isas()]
    for isa in lacking:
        desk = Desk(folder_of("llama"), backend=f"decoder {isa.name}")
        with pytest.raises(ValueError, match="lacks the instruction set"):
            desk.step(desk.sequence(some_ids(4)).row(4))
