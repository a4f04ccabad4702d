"""The memory of keys and values: one run of elements for all layers, cut as kv/layout.py says.

| what                    | where                                                                               |
|-------------------------|-------------------------------------------------------------------------------------|
| slot                    | one token's keys, or values, in one layer: (kv heads, slot dim)                       |
| sector s of a group     | slots [s * sector_slots, (s + 1) * sector_slots) of the group's view of the memory    |
| block b of a sector     | 2 * layers * page_size slots from b * block_slots on; all its bytes in one run        |
| layer i of the group    | keys from slot 2 * i * page_size of a block on, values page_size slots further        |
| the null sector         | sector number num_sectors: given to nobody; zero, unless passes are padded for graphs |

Passes that are padded for graphs have rows that belong to nobody write to the null sector (runner/inputs.py). Their
backends read pages in place and never look there for anybody else.

A slot's dim is the head dim; in int8 four bytes more, each head's scale (kv/layout.py). Only the native backend reads
and writes those.

So one slot number serves all layers of a group: `slot_keys` and `slot_values` begin where the layer does. Padding
points to the null sector, never to one that a request used: a stale NaN there would spread through 0 * NaN.
"""

from __future__ import annotations

import torch

from chairlift_worker.kv.layout import CacheLayout


class PagedCache:
    """Keys and values of `num_sectors` sectors, for all layers. The pool hands out sectors; this owns the bytes."""

    def __init__(
        self, *, layout: CacheLayout, num_sectors: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Takes (num_sectors + 1) sectors of zeros. `dtype` is the model's own type; the layout may say int8.

        Raises ValueError on sizes under 1.
        """
        if num_sectors < 1:
            raise ValueError(f"a cache needs pages: num_sectors={num_sectors}")
        self.layout = layout
        self.num_sectors = num_sectors
        dtype = torch.int8 if layout.is_int8 else dtype
        memory = torch.empty((num_sectors + 1) * layout.sector_elements, dtype=dtype, device=device)
        memory.zero_()  # writes every byte: what is promised is there from the start, and grows no more
        self.sectors = memory.view(num_sectors + 1, layout.sector_elements)
        self.group_of: dict[int, int] = {}  # layer: number of its group
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        for number, group in enumerate(layout.groups):
            slots = memory.view(-1, group.num_kv_heads, group.slot_dim)
            for place, layer in enumerate(group.layers):
                self.group_of[layer] = number
                self._keys[layer] = slots[2 * place * layout.page_size :]
                self._values[layer] = slots[(2 * place + 1) * layout.page_size :]

    def slot_keys(self, layer: int) -> torch.Tensor:
        """(slots, kv heads, slot dim): a view in which a slot number of the layer's group finds the layer's keys."""
        return self._keys[layer]

    def slot_values(self, layer: int) -> torch.Tensor:
        """(slots, kv heads, slot dim): a view in which a slot number of the layer's group finds the layer's values."""
        return self._values[layer]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put one token's key and value into each of `slots`; key and value are (tokens, kv heads, head dim)."""
        self._keys[layer].index_copy_(0, slots, key)
        self._values[layer].index_copy_(0, slots, value)
