"""A paged cache and the rows of one step, laid out by hand for the native attention, and the formula they must obey.

Whatever a row may not look at is NaN: slots of other pages, positions below the window, positions to come. Page table
entries wholly below the window are -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from chairlift_worker.attention.native_kernel import (
    NOTHING,
    ElementType,
    Isa,
    LayerArguments,
    NativeLayer,
    NativeStep,
    Strided,
)

ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.int8: ElementType.INT8,
}
SCALE_BYTES = 4  # behind each head of an int8 cache
UNITS_PER_PAGE = 4  # two layers; the one tested is one of them


@dataclass(frozen=True, kw_only=True)
class Geometry:
    group: int  # query heads per key-value head
    kv_heads: int
    head_dim: int
    page_size: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    cache_type: torch.dtype = torch.float32
    io_type: torch.dtype = torch.float32
    sharpness: float = 1.2  # standard deviation of the scores
    layer: int = 1  # of the page's two

    @property
    def scale(self) -> float:
        return self.sharpness * self.head_dim**-0.5

    @property
    def stored_dim(self) -> int:
        """Elements of a head in the cache."""
        return self.head_dim + (SCALE_BYTES if self.cache_type == torch.int8 else 0)

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads


@dataclass
class Row:
    """One row's whole sequence; the last `num_tokens` positions are new."""

    start: int
    num_tokens: int
    query: torch.Tensor  # (new tokens, heads, dim)
    key: torch.Tensor  # (positions, kv heads, dim)
    value: torch.Tensor


def make_rows(geometry: Geometry, ranges: Sequence[tuple[int, int]], *, seed: int = 1) -> list[Row]:
    """Rows of (start, num_tokens), each from a seed of its own, in values that the io type can hold."""
    rows = []
    for number, (start, num_tokens) in enumerate(ranges):
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        shapes = [
            (num_tokens, geometry.heads),
            (start + num_tokens, geometry.kv_heads),
            (start + num_tokens, geometry.kv_heads),
        ]
        parts = (
            torch.randn((*shape, geometry.head_dim), generator=generator).to(geometry.io_type).float()
            for shape in shapes
        )
        rows.append(Row(start, num_tokens, *parts))
    return rows


def stored(heads: torch.Tensor, cache_type: torch.dtype) -> torch.Tensor:
    """Heads (..., dim) float32 as the cache holds them; int8 is (..., dim + 4), the last the bytes of a float32."""
    if cache_type != torch.int8:
        return heads.to(cache_type)  # to nearest even
    most = heads.abs().amax(dim=-1, keepdim=True)
    inverse = torch.full_like(most, 127) / most  # torch has 127 / most as the product with a rounded reciprocal
    numbers = (heads * inverse).round().to(torch.int8)
    scale = (most / 127).flatten().clone().view(torch.int8)
    return torch.cat([numbers, scale.view(*heads.shape[:-1], SCALE_BYTES)], dim=-1)


def restored(heads: torch.Tensor) -> torch.Tensor:
    """What heads in the cache stand for, float64."""
    if heads.dtype != torch.int8:
        return heads.double()
    scale = heads[..., -SCALE_BYTES:].flatten().clone().view(torch.float32).double()
    return heads[..., :-SCALE_BYTES].double() * scale.view(*heads.shape[:-1], 1)


def first_visible(position: int, window: int) -> int:
    return max(0, position - window + 1) if window else 0


def sink_scores(geometry: Geometry) -> torch.Tensor:
    return torch.linspace(-2, 3, geometry.heads)


def formula(geometry: Geometry, row: Row) -> torch.Tensor:
    """(new tokens, heads, dim) float64: softmax over what each query sees, of what the cache holds."""
    _, value = _held(geometry, row)
    return torch.einsum("hts,shd->thd", _weights(geometry, row), value)


def rounding_allowance(geometry: Geometry, row: Row) -> torch.Tensor:
    """(new tokens, heads, dim): how far an output may be off if queries and weights are rounded to bfloat16.

    A weight w that is off by a share e moves the output by w * e * (value - output). Rounding is at most 2^-8: of the
    weight itself, and of each product in its score. A twentieth more for what is left out of that, squares of e.
    """
    key, value = _held(geometry, row)
    query = row.query.double()
    lost = (query - query.to(torch.bfloat16).double()).abs()
    weights = _weights(geometry, row)
    shares = weights * (2**-8 + torch.einsum("thd,shd->hts", lost, key.abs()) * geometry.scale)
    out = torch.einsum("hts,shd->thd", weights, value).abs()
    off = torch.einsum("hts,shd->thd", shares, value.abs()) + out * shares.sum(dim=-1).T[:, :, None]
    return 1.05 * off


def _held(geometry: Geometry, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as the cache holds them, (positions, heads, dim) float64."""
    key, value = (
        restored(stored(part, geometry.cache_type)).repeat_interleave(geometry.group, dim=1)
        for part in (row.key, row.value)
    )
    return key, value


def _weights(geometry: Geometry, row: Row) -> torch.Tensor:
    """(heads, new tokens, positions) float64."""
    key, _ = _held(geometry, row)
    scores = torch.einsum("thd,shd->hts", row.query.double(), key) * geometry.scale
    if geometry.softcap:
        scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
    queries = torch.arange(row.start, row.start + row.num_tokens)[:, None]
    keys = torch.arange(row.start + row.num_tokens)[None, :]
    visible = keys <= queries
    if geometry.window:
        visible &= keys > queries - geometry.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if geometry.sinks:
        sinks = sink_scores(geometry).double()[:, None, None].expand(-1, row.num_tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(dim=-1)[..., : row.start + row.num_tokens]


@dataclass
class Paged:
    """A cache that holds what the rows computed before this step, and the step."""

    geometry: Geometry
    rows: Sequence[Row]
    seed: int = 1
    cache: torch.Tensor = field(init=False)  # (units, page size, kv heads, dim)
    tables: torch.Tensor = field(init=False)  # (rows, pages) int32

    def __post_init__(self) -> None:
        g = self.geometry
        num_pages = [-(-(row.start + row.num_tokens) // g.page_size) for row in self.rows]
        free = torch.randperm(sum(num_pages) + 3, generator=torch.Generator().manual_seed(self.seed)).tolist()
        shape = (len(free) * UNITS_PER_PAGE, g.page_size, g.kv_heads, g.stored_dim)
        # Of an int8 cache, too: all bits of a scale set are NaN.
        self.cache = torch.full(shape, -1 if g.cache_type == torch.int8 else float("nan"), dtype=g.cache_type)
        self.tables = torch.full((len(self.rows), max(num_pages) + 1), -1, dtype=torch.int32)
        for number, row in enumerate(self.rows):
            lowest = first_visible(row.start, g.window)
            for page in range(lowest // g.page_size, num_pages[number]):
                self.tables[number, page] = free.pop() * UNITS_PER_PAGE
            self._fill(number, row, lowest)

    def _fill(self, number: int, row: Row, lowest: int) -> None:
        positions = torch.arange(lowest, row.start)
        units = self.tables[number, positions // self.geometry.page_size] + 2 * self.geometry.layer
        slots = positions % self.geometry.page_size
        self.cache[units, slots] = stored(row.key[positions], self.cache.dtype)
        self.cache[units + 1, slots] = stored(row.value[positions], self.cache.dtype)

    def slot(self, number: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key and the value of a row's position, each (kv heads, stored dim); views."""
        size = self.geometry.page_size
        unit = int(self.tables[number, position // size]) + 2 * self.geometry.layer
        return self.cache[unit, position % size], self.cache[unit + 1, position % size]

    def attend(self, *, isa: Isa, threads: int, heads_first: bool = False, write: bool = True) -> torch.Tensor:
        """One call of the native kernel; (tokens, heads, dim)."""
        g = self.geometry
        lengths = torch.tensor([0, *(row.num_tokens for row in self.rows)])
        first = lengths.cumsum(0).to(torch.int32)
        start = torch.tensor([row.start for row in self.rows], dtype=torch.int32)
        sinks = sink_scores(g)
        query, key, value = (
            torch.cat(parts).to(g.io_type)
            for parts in (
                [row.query for row in self.rows],
                [row.key[row.start :] for row in self.rows],
                [row.value[row.start :] for row in self.rows],
            )
        )
        if heads_first:  # as transformers' attention modules give them
            query, key, value = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (query, key, value))
        out = torch.full(query.shape, float("nan"), dtype=g.io_type)
        step = NativeStep(
            row_first=first.data_ptr(),
            row_start=start.data_ptr(),
            tables=self.tables.data_ptr(),
            table_stride=self.tables.stride(0),
            num_rows=len(self.rows),
            num_threads=threads,
        )
        layer = NativeLayer(self.arguments(isa, sinks))
        layer.attend(
            step,
            query=strided(query),
            key=strided(key) if write else NOTHING,
            value=strided(value) if write else NOTHING,
            out=strided(out),
        )
        return out

    def arguments(self, isa: Isa, sinks: torch.Tensor) -> LayerArguments:
        g = self.geometry
        return LayerArguments(
            cache=self.cache.data_ptr(),
            num_units=self.cache.shape[0],
            cache_type=ELEMENT_TYPES[g.cache_type],
            io_type=ELEMENT_TYPES[g.io_type],
            page_size=g.page_size,
            heads=g.heads,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            unit_offset=2 * g.layer,
            scale=g.scale,
            window=g.window,
            softcap=g.softcap,
            sinks=sinks.data_ptr() if g.sinks else 0,
            isa=isa,
        )


def strided(tensor: torch.Tensor) -> Strided:
    assert tensor.stride(2) == 1
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)
