"""What fewer bits cost: the demo model's perplexity on a fixed text, and its logits beside those of float32."""

from __future__ import annotations

import functools
import math
from array import array
from dataclasses import replace

import pytest
import torch
from chairlift_worker.attention.native_kernel import Isa, isas
from chairlift_worker.decoder.choice import Quantization
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.kv.layout import KvCacheType, make_layout
from chairlift_worker.model import load_model
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.plan import RowPlan, StepPlan
from chairlift_worker.runner.batch import BatchBuilder
from support.decoder_runner import decoder_runner
from support.paged import GREEDY
from tokenizers import Tokenizer

# Public domain: the beginning of Herman Melville's Moby-Dick (1851), and of the Declaration of Independence (1776).
TEXT = """Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and
nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.
It is a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about
the mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before
coffin warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper
hand of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and
methodically knocking people's hats off, then, I account it high time to get to sea as soon as I can. This is my
substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to the
ship. There is nothing surprising in this. If they but knew it, almost all men in their degree, some time or other,
cherish very nearly the same feelings towards the ocean with me.

When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have
connected them with another, and to assume among the powers of the earth, the separate and equal station to which the
Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires that they should
declare the causes which impel them to the separation. We hold these truths to be self-evident, that all men are created
equal, that they are endowed by their Creator with certain unalienable Rights, that among these are Life, Liberty and
the pursuit of Happiness."""


@functools.cache
def model_of(dtype: str) -> LoadedModel:
    return load_model(WorkerSettings(model="demo", dtype=dtype))


@functools.cache
def text_ids() -> tuple[int, ...]:
    tokenizer = Tokenizer.from_file(str(model_of("float32").tokenizer_dir / "tokenizer.json"))
    return tuple(tokenizer.encode(TEXT).ids)


@functools.cache
def logits_of(
    dtype: str, quantization: Quantization = "none", isa: Isa = Isa.BEST, kv_cache: KvCacheType = "auto"
) -> torch.Tensor:
    """(tokens, vocabulary): the native decoder's, of the whole text in one pass."""
    model, ids = model_of(dtype), text_ids()
    layout = make_layout(model.layers, page_size=16, kv_cache=kv_cache)
    num_sectors = layout.peak(0, len(ids), len(ids))
    runner = decoder_runner(model, layout, num_sectors=num_sectors, isa=isa, quantization=quantization)
    builder = BatchBuilder(layout=layout, num_sectors=num_sectors, device=torch.device("cpu"), form="pages")
    tables = tuple(array("i", range(num_sectors)) for _ in layout.groups)
    row = RowPlan(uid=1, tokens=array("i", ids), start=0, num_tokens=len(ids), tables=tables, sample=GREEDY)
    batch = builder.build(StepPlan(step=1, rows=(row,)))
    return runner._forward(replace(batch, sampled=torch.arange(len(ids))))


@functools.cache
@torch.inference_mode()
def reference() -> torch.Tensor:
    """(tokens, vocabulary): the transformers module's own, in float32."""
    return model_of("float32").module(input_ids=torch.tensor([text_ids()]), use_cache=False).logits[0]


def perplexity(logits: torch.Tensor) -> float:
    ids = torch.tensor(text_ids())
    chosen = logits[:-1].double().log_softmax(-1).gather(1, ids[1:, None])
    return math.exp(-float(chosen.mean()))


def test_the_text_is_one_that_the_model_understands() -> None:
    assert 2 < perplexity(reference()) < 60


@pytest.mark.parametrize("isa", isas())
def test_float32_has_the_modules_own_logits(isa: Isa) -> None:
    torch.testing.assert_close(logits_of("float32", isa=isa), reference(), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("isa", isas())
def test_bfloat16_logits_stay_near_those_of_float32(isa: Isa) -> None:
    """Rounding to 8 bits, some 200 times one after the other: about 2^-8 * sqrt(200) = 0.06 in the worst case."""
    got, wanted = logits_of("bfloat16", isa=isa), reference()
    distance = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(distance.max()) < 0.06
    assert float(distance.median()) < 0.02
    assert perplexity(got) < perplexity(wanted) * 1.005


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.01), ("int4", 0.05)])
def test_quantised_weights_cost_hardly_any_perplexity(quantization: Quantization, most: float, isa: Isa) -> None:
    assert perplexity(logits_of("bfloat16", quantization, isa)) < perplexity(logits_of("bfloat16")) * (1 + most)


def test_keys_and_values_in_int8_cost_hardly_any_perplexity() -> None:
    rounded, plain = (logits_of("bfloat16", kv_cache=kv_cache) for kv_cache in ("int8", "auto"))
    assert not torch.equal(rounded, plain)
    assert perplexity(rounded) < perplexity(plain) * 1.01
