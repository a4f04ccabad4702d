"""Where keys and values lie in the one memory of all layers."""

import psutil
import pytest
import torch
from chairlift_worker.attention.base import AttentionCall, AttentionOptions, PagedStep
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.attention.metadata import StepMetadata
from chairlift_worker.attention.reference import ReferenceAttention
from chairlift_worker.kv.layout import CacheLayout, make_layout

PAGE_SIZE, NUM_SECTORS = 4, 6
WINDOWS = [8, None, 8, 8, 8, None, 8]  # 5 sliding layers and 2 full ones: a sector holds 1 block or 2
SHAPES = {
    "alike": [(2, 3)] * 7,
    "of several shapes": [(2, 3), (1, 8), (2, 3), (3, 4), (2, 3), (2, 3), (2, 3)],
}


def layout_for(shapes: list[tuple[int, int]]) -> CacheLayout:
    layers = [
        LayerFacts(num_kv_heads=heads, head_dim=dim, sliding_window=window)
        for (heads, dim), window in zip(shapes, WINDOWS, strict=True)
    ]
    return make_layout(layers, page_size=PAGE_SIZE)


def slot(layout: CacheLayout, group: int, sector: int, token: int) -> int:
    of = layout.groups[group]
    block, offset = divmod(token, PAGE_SIZE)
    return sector * layout.sector_slots(of) + block * 2 * len(of.layers) * PAGE_SIZE + offset


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_no_two_tokens_layers_or_sectors_share_an_element_and_nothing_leaves_its_sector(
    shapes: list[tuple[int, int]],
) -> None:
    """Each sector is given to one group; every key and value there is written with a number of its own."""
    layout = layout_for(shapes)
    cache = PagedCache(layout=layout, num_sectors=NUM_SECTORS, dtype=torch.float64)
    written: list[tuple[int, int, int, float]] = []
    number = 0.0
    for sector in range(NUM_SECTORS):
        group = sector % len(layout.groups)
        for layer in layout.groups[group].layers:
            heads, dim = shapes[layer]
            for token in range(layout.groups[group].sector_len):
                at, number = slot(layout, group, sector, token), number + 2
                key = torch.full((1, heads, dim), number, dtype=torch.float64)
                cache.write(layer, torch.tensor([at]), key, key + 1)
                written.append((layer, sector, at, number))
                assert cache.sectors[sector].eq(number).sum() == heads * dim
    for layer, _, at, number in written:
        assert cache.slot_keys(layer)[at].eq(number).all()
        assert cache.slot_values(layer)[at].eq(number + 1).all()
    assert cache.sectors[NUM_SECTORS].eq(0).all(), "the null sector is nobody's"


def test_a_block_is_one_run_keys_then_values_of_each_layer_in_turn() -> None:
    layout = layout_for(SHAPES["alike"])
    cache = PagedCache(layout=layout, num_sectors=NUM_SECTORS, dtype=torch.float32)
    full = layout.groups[0]
    assert full.layers == (1, 5)
    for place, layer in enumerate(full.layers):
        slots = torch.tensor([slot(layout, 0, 3, token) for token in range(PAGE_SIZE, 2 * PAGE_SIZE)])
        key = torch.full((PAGE_SIZE, 2, 3), 10.0 * (place + 1))
        cache.write(layer, slots, key, key + 1)
    block = PAGE_SIZE * 2 * 3
    second = cache.sectors[3][4 * block : 8 * block].reshape(4, block)  # after the first block: 2 layers' keys, values
    assert second.tolist() == [[10.0] * block, [11.0] * block, [20.0] * block, [21.0] * block]
    assert cache.sectors[3].count_nonzero() == 4 * block


def test_the_memory_is_taken_at_once_and_does_not_grow_when_it_is_used() -> None:
    layers = [LayerFacts(num_kv_heads=4, head_dim=64, sliding_window=None)] * 4
    layout = make_layout(layers, page_size=16)
    process = psutil.Process()
    before = process.memory_info().rss
    cache = PagedCache(layout=layout, num_sectors=511, dtype=torch.float32)  # 512 * 16 * 4 * 2 * 256 * 4 bytes
    taken = process.memory_info().rss - before
    assert cache.sectors.nbytes == 64 << 20
    assert taken >= 60 << 20
    cache.sectors.fill_(1.0)
    assert process.memory_info().rss - before - taken < 8 << 20


def test_a_layer_that_asks_for_another_window_than_its_cache_was_made_for_is_refused() -> None:
    layout = layout_for(SHAPES["alike"])
    cache = PagedCache(layout=layout, num_sectors=NUM_SECTORS, dtype=torch.float32)
    metadata = [
        StepMetadata(window=group.window, slots=torch.tensor([0]), groups=(), spans=()) for group in layout.groups
    ]
    step = PagedStep(backend=ReferenceAttention(), cache=cache, metadata=metadata)
    some = torch.zeros((1, 2, 3))
    call = AttentionCall(layer=0, query=some, key=some, value=some, options=AttentionOptions(scaling=1.0))
    with pytest.raises(ValueError, match="layer 0 asks for a window of None, but its cache was made for 8"):
        step.attend(call)


def test_a_cache_without_sectors_is_refused() -> None:
    with pytest.raises(ValueError, match="num_sectors=0"):
        PagedCache(layout=layout_for(SHAPES["alike"]), num_sectors=0, dtype=torch.float32)
