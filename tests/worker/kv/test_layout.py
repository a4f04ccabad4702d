"""How layers fall into groups, and what sectors hold."""

import pytest
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.kv.layout import CacheLayout, KvCacheType, make_layout
from hypothesis import given
from hypothesis import strategies as st
from support.layouts import layout_of


def pattern(num_layers: int, sliding_per_full: int, window: int = 1024) -> list[LayerFacts]:
    """Sliding layers with a full one after every so many, as Gemma 3 has them."""
    return [
        LayerFacts(
            num_kv_heads=4,
            head_dim=256,
            sliding_window=None if number % (sliding_per_full + 1) == sliding_per_full else window,
        )
        for number in range(num_layers)
    ]


def test_layers_that_see_equally_far_form_a_group_and_full_attention_comes_first() -> None:
    layout = layout_of(8, None, 4, 8, None)
    assert [(group.window, group.layers) for group in layout.groups] == [(None, (1, 4)), (4, (2,)), (8, (0, 3))]


def test_with_one_kind_of_layers_a_sector_is_a_page() -> None:
    layout = make_layout([LayerFacts(num_kv_heads=3, head_dim=64, sliding_window=None)] * 30, page_size=16)
    (group,) = layout.groups
    assert layout.sector_elements == 16 * 30 * 2 * 3 * 64
    assert group.sector_len == 16
    assert layout.is_uniform
    assert not layout_of(8, 8).is_uniform
    assert not layout_of(None, 8).is_uniform


@pytest.mark.parametrize(
    ("layers", "tokens"),  # tokens of (full, sliding) layers in a sector, with pages of 16
    [
        (pattern(26, 1), (16, 16)),  # Gemma 2, 2B: 13 and 13 layers
        (pattern(48, 5), (80, 16)),  # Gemma 3, 12B: 8 full, 40 sliding
        (pattern(34, 5), (96, 16)),  # Gemma 3, 4B: 5 full, 29 sliding: six blocks of 10 units in 60, and one of 58
        (pattern(26, 5), (80, 16)),  # Gemma 3, 1B: 4 full, 22 sliding: five blocks of 8 units in 44
    ],
)
def test_a_sector_holds_one_block_of_the_larger_group_and_as_many_of_the_smaller_as_fit(
    layers: list[LayerFacts], tokens: tuple[int, int]
) -> None:
    layout = make_layout(layers, page_size=16)
    assert tuple(group.sector_len for group in layout.groups) == tokens


@given(
    st.lists(
        st.builds(
            LayerFacts,
            num_kv_heads=st.sampled_from([1, 2, 3, 8]),
            head_dim=st.sampled_from([8, 24, 64]),
            sliding_window=st.sampled_from([None, 4, 9]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([1, 5, 16]),
    st.sampled_from(["auto", "int8"]),
)
def test_blocks_of_every_group_fit_their_sector_and_each_layer_is_in_one_group(
    layers: list[LayerFacts], page_size: int, kv_cache: KvCacheType
) -> None:
    layout = make_layout(layers, page_size=page_size, kv_cache=kv_cache)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(layers)))
    for group in layout.groups:
        assert {layers[layer] for layer in group.layers} == {
            LayerFacts(num_kv_heads=group.num_kv_heads, head_dim=group.head_dim, sliding_window=group.window)
        }
        assert group.width == group.num_kv_heads * (group.head_dim + (4 if kv_cache == "int8" else 0))
        blocks = group.sector_len // page_size
        assert blocks * page_size == group.sector_len
        assert blocks >= 1
        assert blocks * layout.block_slots(group) <= layout.sector_slots(group)
        assert layout.sector_slots(group) * group.width == layout.sector_elements  # slots do not straddle sectors


def wasted(layout: CacheLayout) -> float:
    """The share of a sector that its blocks leave over, for the group that it suits worst."""
    used = [
        group.sector_len // layout.page_size * layout.block_slots(group) / layout.sector_slots(group)
        for group in layout.groups
    ]
    return 1 - min(used)


@pytest.mark.parametrize("sliding_per_full", [1, 3, 5, 7])
@pytest.mark.parametrize("num_layers", [12, 18, 26, 30, 34, 48, 62])
def test_under_a_tenth_of_a_sector_is_wasted_by_the_usual_patterns_of_layers(
    num_layers: int, sliding_per_full: int
) -> None:
    layout = make_layout(pattern(num_layers, sliding_per_full), page_size=16)
    assert wasted(layout) < 0.1
    assert layout.sector_slots(layout.groups[0]) <= 2 * max(layout.block_slots(group) for group in layout.groups)


@pytest.mark.parametrize("sliding", range(1, 80, 3))
def test_under_a_seventh_of_a_sector_is_wasted_whatever_the_numbers_of_layers(sliding: int) -> None:
    for full in range(1, 80):
        layout = layout_of(*[None] * full, *[100] * sliding)
        assert wasted(layout) < 1 / 7
        assert layout.sector_slots(layout.groups[0]) <= 4 * max(layout.block_slots(group) for group in layout.groups)


@given(
    window=st.one_of(st.none(), st.integers(1, 40)),
    page_size=st.integers(1, 9),
    computed=st.integers(0, 80),
    more=st.integers(1, 60),
    step_len=st.integers(1, 20),
)
def test_the_peak_is_never_less_than_what_some_way_of_stepping_holds(
    window: int | None, page_size: int, computed: int, more: int, step_len: int
) -> None:
    (group,) = layout_of(window, page_size=page_size).groups
    peak, total = group.peak(computed, computed + more, step_len), computed + more
    held_most = 0
    for start in range(computed, total):  # wherever earlier steps ended, one of these lengths is the longest
        end = min(total, start + step_len)
        positions = range(0 if window is None else max(0, start - window + 1), end)
        held_most = max(held_most, len({position // page_size for position in positions}))
    assert held_most <= peak <= held_most + 1


@pytest.mark.parametrize(("computed", "peak"), [(20, 4), (21, 3), (22, 3), (23, 3), (24, 4)])
def test_the_peak_of_a_single_step_is_exact(computed: int, peak: int) -> None:
    """A window of 10 in pages of 4: of 11..20 four pages hold some, of 12..21, 13..22 and 14..23 three."""
    (group,) = layout_of(10, page_size=4).groups
    assert group.peak(computed, computed + 1, 1) == peak


def test_the_capacity_is_the_longest_run_that_fits_whatever_its_steps() -> None:
    layout = layout_of(None, 10, page_size=4)
    for num_sectors in range(2, 20):
        capacity = layout.capacity(num_sectors=num_sectors, step_len=3, limit=1000)
        # 9 tokens before a step of 3 are 12 in a row: at most 4 pages of 4
        fits = [n for n in range(1, 1000) if -(-n // 4) + min(-(-n // 4), 4) <= num_sectors]
        assert capacity == max(fits)


def test_a_window_that_fits_leaves_the_limit_as_the_only_bound() -> None:
    layout = layout_of(10, page_size=4)
    assert layout.capacity(num_sectors=4, step_len=3, limit=1000) == 1000
    assert layout.capacity(num_sectors=3, step_len=3, limit=1000) == 12


def test_a_layout_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size=0"):
        layout_of(None, page_size=0)
    with pytest.raises(ValueError, match="0 layers"):
        layout_of()


@pytest.mark.parametrize("window", [1, 3, 8, 10])
@pytest.mark.parametrize("page_size", [1, 4, 5])
def test_the_next_change_is_where_a_sector_is_needed_no_more(window: int, page_size: int) -> None:
    (group,) = layout_of(window, page_size=page_size).groups
    for position in range(60):
        following = next(
            later for later in range(position + 1, 99) if group.first_needed(later) > group.first_needed(position)
        )
        assert group.next_change(position) == following
