"""TextService: truncation, offsets and batches, against transformers' fast tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from chairlift.v1 import text_service_pb2 as pb
from chairlift_service.text.tokenizer import Tokenizer
from support.served import refusal, serving
from support.tokenizer_files import byte_fallback, byte_level, gemma, metaspace, word_piece
from transformers import PreTrainedTokenizerFast

TEXTS = ["", "the quick fox", "žluťoučký 🦊👩‍👩‍👧 kůň", "  two  spaces\n\tand a tab ", "🦊", "日本語 text", "a" * 300]


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback(), metaspace(), gemma(), word_piece()])
@pytest.mark.parametrize("add_special_tokens", [False, True])
async def test_spans_are_transformers_offsets(backend: tokenizers.Tokenizer, *, add_special_tokens: bool) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = Tokenizer(backend=backend)
    try:
        for text in TEXTS:
            wanted = reference(text, return_offsets_mapping=True, add_special_tokens=add_special_tokens)
            ids, spans = await tokenizer.encode_spans(text, add_special_tokens=add_special_tokens)
            assert ids == wanted["input_ids"]
            assert spans == wanted["offset_mapping"]
    finally:
        tokenizer.close()


async def test_a_text_that_begins_with_bos_has_one_span_for_it(tmp_path: Path) -> None:
    backend = gemma()
    bos = backend.encode("").tokens[0]
    tokenizer = Tokenizer(backend=backend)
    ids, spans = await tokenizer.encode_spans(f"{bos}fox")
    tokenizer.close()
    own = backend.encode(f"{bos}fox", add_special_tokens=False)
    assert (ids, spans) == (own.ids, own.offsets)
    assert spans[0] == (0, len(bos))


async def test_tokens_are_cut_off_and_their_places_told_as_asked() -> None:
    text, whole = "the quick 🦊 fox", byte_level().encode("the quick 🦊 fox")
    async with serving() as served:
        for count in (0, 1, len(whole.ids) - 1, len(whole.ids), len(whole.ids) + 1):
            answer = await served.text.Tokenize(pb.TokenizeRequest(text=text, max_tokens=count, offsets=True))
            assert list(answer.token_ids) == whole.ids[:count]
            assert list(zip(answer.starts, answer.ends, strict=True)) == whole.offsets[:count]
            assert answer.truncated == (count < len(whole.ids))
            assert len(answer.tokens) == len(answer.token_ids)
        plain = await served.text.Tokenize(pb.TokenizeRequest(text=text))
        assert (list(plain.token_ids), list(plain.starts), plain.truncated) == (whole.ids, [], False)


async def test_a_batch_is_the_answers_of_its_parts_or_none() -> None:
    async with serving() as served:
        parts = [
            pb.TokenizeRequest(text="the fox"),
            pb.TokenizeRequest(text="", offsets=True),
            pb.TokenizeRequest(text="quick", max_tokens=1, offsets=True),
        ]
        batch = await served.text.BatchTokenize(pb.BatchTokenizeRequest(requests=parts))
        assert list(batch.responses) == [await served.text.Tokenize(part) for part in parts]
        assert not (await served.text.BatchTokenize(pb.BatchTokenizeRequest())).responses
        lists = [pb.DetokenizeRequest(token_ids=ids) for ids in ([], [40, 41], [42])]
        texts = await served.text.BatchDetokenize(pb.BatchDetokenizeRequest(requests=lists))
        assert list(texts.responses) == [await served.text.Detokenize(each) for each in lists]
        wrong = [*lists, pb.DetokenizeRequest(token_ids=[5, -1])]
        refused = await refusal(served.text.BatchDetokenize(pb.BatchDetokenizeRequest(requests=wrong)))
        assert (refused.reason, refused.fields) == ("UNKNOWN_TOKEN_ID", ("requests[3].token_ids[1]",))


async def test_too_many_and_too_large_ones_are_refused_before_any_work() -> None:
    async with serving(max_message_bytes=2**20) as served:
        many = pb.BatchTokenizeRequest(requests=[pb.TokenizeRequest()] * 1025)
        assert (await refusal(served.text.BatchTokenize(many))).fields == ("requests",)
        lists = pb.BatchDetokenizeRequest(requests=[pb.DetokenizeRequest()] * 1025)
        assert (await refusal(served.text.BatchDetokenize(lists))).fields == ("requests",)
        most = 2**20 // 16
        fits = pb.BatchTokenizeRequest(requests=[pb.TokenizeRequest(text="a" * (most // 2))] * 2)
        assert len((await served.text.BatchTokenize(fits)).responses) == 2
        fits.requests.add(text="a")
        assert (await refusal(served.text.BatchTokenize(fits))).reason == "MESSAGE_TOO_LARGE"
        half = pb.TokenizeRequest(text="\x01" * (most // 2), offsets=True)  # each a token of its own
        assert len((await served.text.Tokenize(half)).starts) > 0
        half.text += "a"
        assert (await refusal(served.text.Tokenize(half))).reason == "MESSAGE_TOO_LARGE"
