"""The tokenizer against transformers' own loading of the same folder."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.text import tokenizer as module
from chairlift_service.text.tokenizer import Tokenizer
from support import tokenizer_files as made

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "Příliš žluťoučký kůň",
    "<|im_start|>user\nhi<|im_end|>",
    "a  b\n\n c",
    "👨\u200d👩\u200d👧",
]


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2s_ids_and_text_equal_transformers(smollm2_folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_folder)
    tokenizer = Tokenizer.load(smollm2_folder)
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert tokenizer.tokens(ids) == reference.convert_ids_to_tokens(ids)
    assert [tokenizer.is_special(i) for i in ids] == [i in reference.all_special_ids for i in ids]


CONFIGS = [
    {},
    {"add_bos_token": True, "bos_token": "<s>"},
    {"add_bos_token": False, "bos_token": "<s>"},
    {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
    {"add_eos_token": True, "bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
    {"eos_token": "!", "pad_token": "▁the"},  # pieces of the vocabulary that only the config makes special
    {"additional_special_tokens": ["<fresh>"], "bos_token": "<s>"},
    {
        "added_tokens_decoder": {
            "290": {"content": "<call>", "special": True, "normalized": False},
            "289": {"content": "<plain>", "special": False, "normalized": False},
        }
    },
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("text", ["the fox! a", "<s>the</s> <tool>", "<fresh> the <call><plain>", ""])
def test_what_tokenizer_config_changes_equals_transformers(tmp_path: Path, config: dict, text: str) -> None:
    from transformers import PreTrainedTokenizerFast

    made.byte_fallback().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}), encoding="utf-8"
    )
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for add in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=add)
        assert ids == reference.encode(text, add_special_tokens=add)
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert tokenizer.size == max(reference.get_vocab().values()) + 1


def test_a_folder_without_tokenizer_config_has_the_ids_of_tokenizer_json(tmp_path: Path) -> None:
    made.byte_fallback().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("the fox") == made.byte_fallback().encode("the fox").ids


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    library = made.byte_level()
    library.enable_truncation(max_length=2)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(TEXTS[3]) == made.byte_level().encode(TEXTS[3]).ids


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[1]")])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    made.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=name):
        Tokenizer.load(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


async def test_a_long_text_leaves_the_event_loop_free() -> None:
    tokenizer = Tokenizer(backend=made.byte_level())
    text = "the quick brown fox " * 200_000
    start = time.perf_counter()
    expected = tokenizer.encode(text)
    blocked = time.perf_counter() - start
    gaps = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - before)

    ticker = asyncio.create_task(tick())
    assert await tokenizer.encode_async(text) == expected
    ticker.cancel()
    print(f"blocked {blocked:.2f} s when in the loop, longest gap {max(gaps):.3f} s when not")
    assert len(gaps) > 10
    assert max(gaps) < blocked / 3
    tokenizer.close()


async def test_more_long_texts_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_TEXTS", 2)
    tokenizer = Tokenizer(backend=made.byte_level())
    text = "fox " * 2000
    outcomes = await asyncio.gather(*(tokenizer.encode_async(text) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [list, list, ServiceError]
    assert outcomes[2].reason is Reason.QUEUE_FULL
    assert await tokenizer.encode_async(text) == outcomes[0], "there is room again"
    tokenizer.close()
