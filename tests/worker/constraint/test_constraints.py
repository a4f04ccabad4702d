"""Which tokens may come next, and requests from their grammar to their ending."""

from __future__ import annotations

import ctypes
import json
import random
import re
import time
from array import array
from pathlib import Path

import pytest
import torch
from chairlift_worker.constraint.constraints import Constraints, Prepared
from chairlift_worker.constraint.errors import ConstraintError
from chairlift_worker.constraint.grammars import MAX_KEPT, Grammars
from chairlift_worker.constraint.matcher import Matcher
from chairlift_worker.ipc.messages import AddRequestMsg, ResumedMsg, SamplingMsg
from chairlift_worker.plan import RowPlan, SampleSpec
from chairlift_worker.sampling.native import SampleStatus
from chairlift_worker.sampling.processors import mask_row
from llguidance import LLMatcher
from support.tokenizer_files import byte_level

NUM_TOKENS = byte_level().get_vocab_size()
EOS_ID = byte_level().token_to_id("<|end|>")
WORD = LLMatcher.grammar_from_regex("ab+(cd|ce)?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=[NUM_TOKENS, NUM_TOKENS - 20], ids=["as many rows", "fewer rows"])
def grammars(folder: Path, request: pytest.FixtureRequest) -> Grammars:
    vocab_size = request.param
    return Grammars(tokenizer_dir=folder, vocab_size=vocab_size, eos_token_ids=(EOS_ID,))


def allowed(address: int) -> set[int]:
    words = (ctypes.c_uint32 * -(-NUM_TOKENS // 32)).from_address(address)
    return {i for i in range(NUM_TOKENS) if words[i // 32] >> (i % 32) & 1}


def texts(token_ids: set[int]) -> set[str]:
    return {byte_level().decode([token_id]) for token_id in token_ids - {EOS_ID}}


def ids_of(text: str) -> list[int]:
    tokenizer = byte_level()
    return [tokenizer.encode(char).ids[0] for char in text]


def test_the_mask_has_every_token_that_a_regular_expression_can_go_on_with(grammars: Grammars) -> None:
    """By the definition: what comes is a beginning of something that matches."""
    matcher = Matcher(grammars.matcher(WORD), num_tokens=NUM_TOKENS)
    beginnings = re.compile("a?|ab+c?|ab+(cd|ce)")
    so_far = ""
    for letter in "abbce":
        may_come = {
            i
            for i in range(byte_level().get_vocab_size())
            if (text := byte_level().decode([i])) and beginnings.fullmatch(so_far + text)
        } - {EOS_ID}
        mask = allowed(matcher.mask(len(so_far)))
        assert mask - {EOS_ID} == may_come
        assert (EOS_ID in mask) == (re.fullmatch("ab+(cd|ce)?", so_far) is not None)
        matcher.feed(ids_of(letter))
        so_far += letter
    assert matcher.is_complete


def test_tokens_beyond_are_forgotten_and_missing_ones_are_an_error(grammars: Grammars) -> None:
    matcher = Matcher(grammars.matcher(WORD), num_tokens=NUM_TOKENS)
    matcher.feed(ids_of("abbc"))
    assert texts(allowed(matcher.mask(1))) >= {"b"}
    assert "c" not in texts(allowed(matcher.mask(1)))
    matcher.feed(ids_of("bcd"))
    assert matcher.is_complete
    with pytest.raises(ConstraintError, match="never seen"):
        matcher.mask(9)
    with pytest.raises(ConstraintError):
        Matcher(grammars.matcher(WORD), num_tokens=NUM_TOKENS).feed(ids_of("b"))


def test_a_mask_leaves_out_what_has_no_bit() -> None:
    torch.manual_seed(0)
    logits = torch.randn(NUM_TOKENS)
    keep = torch.rand(NUM_TOKENS) < 0.3
    words = (ctypes.c_uint32 * -(-NUM_TOKENS // 32))()
    for i in keep.nonzero().flatten().tolist():
        words[i // 32] |= 1 << (i % 32)
    before, out = logits.clone(), torch.zeros(NUM_TOKENS)
    for target in (out, logits):
        status = mask_row(logits.data_ptr(), NUM_TOKENS, ctypes.addressof(words), out=target.data_ptr())
        assert status is SampleStatus.OK
        assert torch.equal(target, before.masked_fill(~keep, -torch.inf))
    spoilt = before.clone()
    spoilt[(~keep).nonzero()[0]] = torch.nan
    assert (
        mask_row(spoilt.data_ptr(), NUM_TOKENS, ctypes.addressof(words), out=out.data_ptr()) is SampleStatus.NOT_FINITE
    )


def message(uid: int, grammar: str, generated: str | None = None) -> AddRequestMsg:
    resumed = None
    if generated is not None:
        ids = array("i", ids_of(generated)).tobytes()
        resumed = ResumedMsg(generated=ids, cached_tokens=0, started_ns=1, first_token_ns=1, preemptions=0)
    return AddRequestMsg(
        uid=uid,
        prompt=array("i", [1]).tobytes(),
        max_new_tokens=9,
        sampling=SamplingMsg(temperature=0, top_k=0, top_p=1, min_p=0, seed=0),
        stop_ids=(),
        logprobs=False,
        arrival_ns=0,
        deadline_ns=0,
        grammar=grammar,
        resumed=resumed,
    )


def prepared(constraints: Constraints) -> dict[int, Prepared]:
    found: dict[int, Prepared] = {}
    while constraints.is_preparing:
        found.update((each.uid, each) for each in constraints.finished())
        time.sleep(0.001)
    return found


def row(uid: int, index: int) -> RowPlan:
    spec = SampleSpec(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, index=index, logprob=False, constrained=True)
    return RowPlan(uid=uid, tokens=array("i", [1]), start=0, num_tokens=1, tables=(), sample=spec)


def test_requests_are_prepared_followed_and_forgotten(grammars: Grammars) -> None:
    constraints = Constraints(grammars=grammars)
    constraints.begin(message(1, WORD))
    constraints.begin(message(2, WORD, "abb"))
    constraints.begin(message(3, WORD, "abcd"))
    constraints.begin(message(4, WORD, "x"))
    constraints.begin(message(5, LLMatcher.grammar_from_lark("start: nothing")))
    found = prepared(constraints)
    assert {uid: (each.is_complete, each.error.partition(":")[0]) for uid, each in found.items()} == {
        1: (False, ""),
        2: (False, ""),
        3: (True, ""),
        4: (False, "INTERNAL"),
        5: (False, "INVALID_VALUE"),
    }
    constraints.prepare([row(1, 0), row(2, 3)])
    first = constraints.mask(1, 0)
    assert first is not None
    assert texts(allowed(first)) == {"a", *({"ab"} & texts(set(range(NUM_TOKENS))))}
    assert not constraints.chosen(2, ids_of("b")[0])
    assert not constraints.chosen(2, ids_of("c")[0])
    assert constraints.chosen(2, ids_of("e")[0])
    assert constraints.mask(2, 6) is None, "a step was planned ahead"
    again = constraints.mask(2, 5)
    assert again is not None, "the step is computed a second time"
    assert {"d", "e"} <= texts(allowed(again))
    assert constraints.chosen(2, ids_of("d")[0])
    with pytest.raises(ConstraintError):
        constraints.chosen(1, ids_of("z")[0])
    constraints.forget(lambda uid: uid == 1)
    assert constraints.mask(1, 0) is None
    assert not constraints.chosen(1, 5)


def test_tokens_that_cannot_be_read_end_the_request_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = Grammars(tokenizer_dir=tmp_path, vocab_size=NUM_TOKENS, eos_token_ids=(EOS_ID,))
    constraints = Constraints(grammars=grammars)
    constraints.begin(message(1, WORD))
    assert prepared(constraints)[1].error.startswith("UNSUPPORTED_OPTION: ")


def test_as_many_grammars_are_kept_as_there_may_be(grammars: Grammars) -> None:
    for number in range(MAX_KEPT + 10):
        grammars.matcher(LLMatcher.grammar_from_regex(f"a{{{number}}}"))
    assert len(grammars._compiled) == MAX_KEPT


def test_random_walks_of_a_schema_are_what_it_allows(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 12}, "s": {"enum": ["x", "yy"]}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    rng = random.Random(3)
    for _ in range(30):
        matcher = Matcher(grammars.matcher(LLMatcher.grammar_from_json_schema(schema)), num_tokens=NUM_TOKENS)
        ids: list[int] = []
        while not matcher.is_complete and len(ids) < 500:
            ids.append(rng.choice(sorted(allowed(matcher.mask(len(ids))))))
            matcher.feed(ids[-1:])
        if matcher.is_complete:
            value = json.loads(byte_level().decode(ids))
            assert 0 <= value["n"] <= 12
            assert value["s"] in {"x", "yy"}
            assert value.keys() == {"n", "s"}
