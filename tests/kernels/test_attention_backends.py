"""Every attention backend against the formula, written out once more in float64 without any cache."""

import math
from array import array
from dataclasses import replace

import pytest
import torch
from chairlift_worker.attention.backends import BACKENDS, make_backend
from chairlift_worker.attention.base import AttentionCall, AttentionOptions
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.kv.layout import make_layout
from chairlift_worker.plan import StepPlan
from chairlift_worker.runner.batch import BatchBuilder
from support.paged import Sectors, Sequence, some_ids

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_SECTORS = 9, 3, 16, 4, 512
LAYER = LayerFacts(num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, sliding_window=None)
PLAIN = AttentionOptions(scaling=0.3)
OPTIONS = {
    "plain": PLAIN,
    "window 1": replace(PLAIN, sliding_window=1),
    "window 7": replace(PLAIN, sliding_window=7),
    "window as long as the context": replace(PLAIN, sliding_window=30),
    "soft cap": replace(PLAIN, softcap=1.5),
    "sinks": replace(PLAIN, sinks=torch.linspace(-2, 3, NUM_HEADS)),
    "all": replace(PLAIN, softcap=2.0, sliding_window=5, sinks=torch.linspace(-2, 3, NUM_HEADS)),
}
# (start, num_tokens) of the rows of one step
STEPS = {
    "one token": [(0, 1)],
    "one-token rows": [(0, 1), (5, 1), (29, 1), (30, 1), (7, 1)],
    "one-token rows far apart": [(200, 1), (2, 1), (120, 1), (3, 1), (199, 1)],
    "whole prompts": [(0, 2), (0, 31), (0, 8)],
    "chunks": [(3, 2), (16, 13), (1, 30)],
    "all sorts": [(30, 1), (0, 1), (4, 1), (0, 5), (25, 6), (3, 4)],
}


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, options: AttentionOptions
) -> torch.Tensor:
    """(tokens, heads, dim) at positions start, start + 1, ... of a whole sequence's queries, keys and values."""
    out = torch.zeros_like(query[start:])
    for head in range(query.shape[1]):
        kv_head = head * key.shape[1] // query.shape[1]  # 0, 0, 0, 1, 1, 1, ...
        for t in range(start, query.shape[0]):
            first = 0 if options.sliding_window is None else max(0, t - options.sliding_window + 1)
            scores = (key[first : t + 1, kv_head] @ query[t, head] * options.scaling).tolist()
            if options.softcap:
                scores = [options.softcap * math.tanh(score / options.softcap) for score in scores]
            weights = torch.tensor([math.exp(score) for score in scores], dtype=torch.float64)
            total = weights.sum() + (0 if options.sinks is None else math.exp(float(options.sinks[head])))
            out[t - start, head] = (weights / total) @ value[first : t + 1, kv_head]
    return out


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("ranges", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_every_row_is_what_the_formula_says(
    name: str, ranges: list[tuple[int, int]], options: AttentionOptions
) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = replace(LAYER, sliding_window=options.sliding_window)
    layout = make_layout(
        [replace(LAYER, sliding_window=3 if options.sliding_window else 5), layer], page_size=PAGE_SIZE
    )
    cache = PagedCache(layout=layout, num_sectors=NUM_SECTORS, dtype=torch.float32)
    backend = make_backend(name)
    builder = BatchBuilder(layout=layout, num_sectors=NUM_SECTORS, device=torch.device("cpu"), form=backend.form)
    sectors, group = Sectors(layout, NUM_SECTORS), layout.groups[cache.group_of[1]]
    rows, packed, wanted = [], [], []
    for uid, (start, num_tokens) in enumerate(ranges):
        end = start + num_tokens
        query, key, value = (
            torch.randn((end, heads, HEAD_DIM), generator=generator)
            for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )
        tables = sectors.tables(end)
        own = tables[cache.group_of[1]]
        slots = [own[p // group.sector_len] * layout.sector_slots(group) + p % group.sector_len for p in range(start)]
        cache.write(1, torch.tensor(slots, dtype=torch.int64), key[:start], value[:start])
        sequence = Sequence(uid=uid, tokens=array("i", some_ids(end)), tables=tables, computed=start)
        rows.append(sequence.row(num_tokens))
        packed.append((query[start:], key[start:], value[start:]))
        whole = (part.double() for part in (query, key, value))
        wanted.append(formula(*whole, start, options))
    query, key, value = (torch.cat(parts) for parts in zip(*packed, strict=True))
    batch = builder.build(StepPlan(step=1, rows=tuple(rows)))
    step = backend.step(cache, batch.metadata)
    got = step.attend(AttentionCall(layer=1, query=query, key=key, value=value, options=options))
    torch.testing.assert_close(got.double(), torch.cat(wanted), atol=2e-6, rtol=1e-5)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'flash'"):
        make_backend("flash")
