"""How one memory serves layers of several kinds: groups of layers, and equal sectors cut into blocks.

Layers that see equally far and whose keys have the same shape form a group, with page tables of its own.

| piece  | what                                                                                      |
|--------|-------------------------------------------------------------------------------------------|
| unit   | keys, or values, of page_size tokens in one layer                                           |
| block  | page_size tokens of all layers of a group: keys and values of each layer in turn, one run   |
| sector | what the pool hands out: as many blocks of one group as fit, for one request                |

A sector belongs to one request and one group at a time. Sectors that several requests share would fill a little
better, but get fragmented: a request that holds one block in each of many sectors can then find no room although the
others are gone. So what a request needs is a number of sectors, and numbers of sectors add up.

An element is a number of the model's own type, or, in int8, a byte: behind the numbers of each token's key or value in
a head are SCALE_LEN bytes, the float32 that they are multiplied by.

What is wasted: the rest of a sector that holds no further block, under a tenth for the usual patterns of layers and a
seventh for the most awkward numbers; and on average half a sector for each request and group. For the usual patterns a
sector is hardly larger than the largest group's block, so that half a sector is half a page of a model with one kind of
layers; it is never more than MAX_SCALE such blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from chairlift_worker.attention.layer import LayerFacts

# Share of a sector that may stay unused at its end, if a sector of up to so many of the largest blocks allows it.
MAX_REMAINDER: Final = 0.1
MAX_SCALE: Final = 4
SCALE_LEN: Final = 4

KvCacheType = Literal["auto", "int8"]
"""What keys and values are kept as: auto is the model's own type."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share page tables, and what a sector is to them."""

    layers: tuple[int, ...]  # their numbers in the model; the place in this tuple is the layer's place in a block
    window: int | None  # tokens seen, the query's own included; None: all
    num_kv_heads: int
    head_dim: int
    slot_dim: int  # elements that a token's key takes in a head: those of a scale, too
    sector_len: int  # tokens that a sector holds

    @property
    def width(self) -> int:
        """Elements of one token's keys, or values, in one layer."""
        return self.num_kv_heads * self.slot_dim

    def sectors_for(self, num_tokens: int) -> int:
        """Sectors that hold this many tokens, from the first on."""
        return -(-num_tokens // self.sector_len)

    def first_needed(self, position: int) -> int:
        """The first sector that a token at this position, or any after it, looks at."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.sector_len

    def next_change(self, position: int) -> int:
        """The next position at which `first_needed` is more; of groups with a window."""
        assert self.window is not None, "without a window nothing is ever given back"
        return (self.first_needed(position) + 1) * self.sector_len + self.window - 1

    def peak(self, computed: int, total: int, step_len: int) -> int:
        """The most sectors held at once on the way from `computed` to `total` tokens in steps of up to step_len."""
        whole = self.sectors_for(total) - self.first_needed(computed)
        if self.window is None:
            return whole
        seen = self.window - 1 + min(step_len, total - computed)  # by one step's tokens, themselves included
        return min(whole, (seen - 2) // self.sector_len + 2)  # wherever it begins in a sector

    def peaks(self, *, computed: int, total: int, max_total: int, step_len: int) -> tuple[int, int]:
        """The peak on the way to `total`, and that of the whole way, which goes on token by token to max_total."""
        if self.window is None:  # said once more in short: this is asked for each active request in every step
            return -(-total // self.sector_len), -(-max(total, max_total) // self.sector_len)
        now = self.peak(computed, total, step_len)
        return now, max(now, self.peak(computed, max_total, 1))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's layers, full attention first, and the size of the sectors that they share."""

    page_size: int
    sector_width: int  # elements of a sector for each of its page_size tokens
    groups: tuple[LayerGroup, ...]
    is_int8: bool = False

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are full attention of one shape: what prefix sharing needs."""
        return len(self.groups) == 1 and self.groups[0].window is None

    @property
    def sector_elements(self) -> int:
        """Elements of a sector."""
        return self.page_size * self.sector_width

    def sector_bytes(self, item_bytes: int) -> int:
        """Bytes of a sector, of a model whose numbers have so many."""
        return self.sector_elements * (1 if self.is_int8 else item_bytes)

    def sector_slots(self, group: LayerGroup) -> int:
        """Distance from sector to sector in slots: the room that one token of one layer of the group takes."""
        return self.sector_elements // group.width

    def block_slots(self, group: LayerGroup) -> int:
        """Distance from block to block within a sector, in slots."""
        return 2 * len(group.layers) * self.page_size

    def sector_units(self, group: LayerGroup) -> int:
        """Distance from sector to sector in the group's units."""
        return self.sector_width // group.width

    def describe_sector(self) -> str:
        """What a sector is to layers of several kinds, to be put behind their number; empty for one kind."""
        if len(self.groups) == 1:
            return ""
        kinds = " or ".join(
            f"{group.sector_len} tokens of the {len(group.layers)} layers with "
            + ("full attention" if group.window is None else f"a window of {group.window}")
            for group in self.groups
        )
        return f"; each is a sector that holds {kinds}"

    def peak(self, computed: int, total: int, step_len: int) -> int:
        """The most sectors that a request holds at once on the way from `computed` to `total` tokens."""
        return sum(group.peak(computed, total, step_len) for group in self.groups)

    def capacity(self, *, num_sectors: int, step_len: int, limit: int) -> int:
        """Tokens that a request alone can have in this many sectors, however it is cut into steps of up to step_len.

        Layers with a window set no bound once it fits: then, and only then, `limit` is the answer.
        """
        if len(self.groups) == 1 and self.groups[0].window is None:
            return num_sectors * self.groups[0].sector_len
        low, high = 0, limit  # low tokens fit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak(0, middle, step_len) <= num_sectors else (low, middle - 1)
        return low


def make_layout(layers: Sequence[LayerFacts], *, page_size: int, kv_cache: KvCacheType = "auto") -> CacheLayout:
    """The layout of a model's layers. Raises ValueError on sizes under 1."""
    if page_size < 1 or not layers:
        raise ValueError(f"a cache needs pages and layers: page_size={page_size}, {len(layers)} layers")
    alike: dict[LayerFacts, list[int]] = {}
    for number, facts in enumerate(layers):
        alike.setdefault(facts, []).append(number)
    kinds = sorted(alike, key=lambda facts: (facts.sliding_window or 0, facts.num_kv_heads, facts.head_dim))
    is_int8 = kv_cache == "int8"
    dims = [facts.head_dim + (SCALE_LEN if is_int8 else 0) for facts in kinds]
    widths = [2 * len(alike[facts]) * facts.num_kv_heads * dim for facts, dim in zip(kinds, dims, strict=True)]
    step = math.lcm(*(facts.num_kv_heads * dim for facts, dim in zip(kinds, dims, strict=True)))
    sector_width = _sector_width(widths, step)
    groups = tuple(
        LayerGroup(
            layers=tuple(alike[facts]),
            window=facts.sliding_window,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            slot_dim=dim,
            sector_len=sector_width // width * page_size,
        )
        for facts, dim, width in zip(kinds, dims, widths, strict=True)
    )
    return CacheLayout(page_size=page_size, sector_width=sector_width, groups=groups, is_int8=is_int8)


def _sector_width(widths: Sequence[int], step: int) -> int:
    """The smallest multiple of `step` that blocks of all these widths fill well enough, else the one they fill best."""
    largest = max(widths)
    first = -(-largest // step)
    choices = [step * count for count in range(first, max(first, MAX_SCALE * largest // step) + 1)]
    remainders = [max(choice % width for width in widths) / choice for choice in choices]
    good = [choice for choice, remainder in zip(choices, remainders, strict=True) if remainder <= MAX_REMAINDER]
    return good[0] if good else choices[remainders.index(min(remainders))]
