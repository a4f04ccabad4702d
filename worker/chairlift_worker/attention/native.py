"""Attention by the native kernel, which reads and writes the pages in place: the default on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from chairlift_worker.attention.base import AttentionCall, RowForm, check_window
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.metadata import PageRows
from chairlift_worker.attention.native_kernel import (
    ElementType,
    Isa,
    LayerArguments,
    NativeLayer,
    NativeStep,
    Strided,
)

_TYPES: Final = {torch.float32: ElementType.FLOAT32, torch.bfloat16: ElementType.BFLOAT16}
CACHE_TYPES: Final = {**_TYPES, torch.int8: ElementType.INT8}


@dataclass(frozen=True, slots=True)
class _Known:
    """A layer as the kernel takes it, and what it was made of."""

    facts: tuple[object, ...]
    native: NativeLayer
    sinks: torch.Tensor | None  # float32; here so that its address stays valid


class NativeAttention:
    """The backend `native`. One cache only; the number of threads is that of the thread that makes the step."""

    name = "native"
    form: RowForm = "pages"

    def __init__(self, *, isa: Isa = Isa.BEST) -> None:
        self._isa = isa
        self._layers: dict[int, _Known] = {}

    def step(self, cache: PagedCache, metadata: Sequence[PageRows]) -> NativePagedStep:
        """One forward pass. Raises ValueError for a cache whose type the kernel does not compute in."""
        if cache.sectors.dtype not in CACHE_TYPES or cache.sectors.device.type != "cpu":
            raise ValueError(f"native attention has no {cache.sectors.dtype} on {cache.sectors.device}")
        return NativePagedStep(backend=self, cache=cache, metadata=metadata)

    def layer(self, call: AttentionCall, cache: PagedCache) -> NativeLayer:
        """The layer of a call, made at its first one and again where it asks for something else than before."""
        options, query = call.options, call.query
        facts = (
            cache.sectors.data_ptr(),
            query.dtype,
            query.shape[1:],
            options.scaling,
            options.softcap,
            options.sinks is None,
        )
        known = self._layers.get(call.layer)
        if known is None or known.facts != facts:
            sinks = None if options.sinks is None else torch.empty(query.shape[1], dtype=torch.float32)
            known = _Known(facts, NativeLayer(_arguments(call, cache, sinks, self._isa)), sinks)
            self._layers[call.layer] = known
        if known.sinks is not None and options.sinks is not None:
            known.sinks.copy_(options.sinks)  # each time: the model's weights may be others by now
        return known.native


class NativePagedStep:
    """One forward pass: the rows' tables are passed once for each group of layers."""

    def __init__(self, *, backend: NativeAttention, cache: PagedCache, metadata: Sequence[PageRows]) -> None:
        threads = torch.get_num_threads()
        self._backend = backend
        self._cache = cache
        self._metadata = metadata  # also keeps the memory behind the addresses
        self._steps = [
            NativeStep(
                row_first=rows.first.data_ptr(),
                row_start=rows.start.data_ptr(),
                tables=rows.tables.data_ptr(),
                table_stride=rows.tables.stride(0),
                num_rows=rows.num_rows,
                num_threads=threads,
            )
            for rows in metadata
        ]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """(tokens, query heads, head dim). Raises ValueError for a window that the layer never had."""
        number = self._cache.group_of[call.layer]
        check_window(call, self._metadata[number].window)
        query = call.query
        out = query.new_empty(query.shape)
        query, key, value = _whole_heads(query), _whole_heads(call.key), _whole_heads(call.value)
        self._backend.layer(call, self._cache).attend(
            self._steps[number], query=_strided(query), key=_strided(key), value=_strided(value), out=_strided(out)
        )
        return out


def _arguments(call: AttentionCall, cache: PagedCache, sinks: torch.Tensor | None, isa: Isa) -> LayerArguments:
    layout = cache.layout
    group = layout.groups[cache.group_of[call.layer]]
    options = call.options
    if call.query.dtype not in _TYPES:
        raise ValueError(f"native attention has no {call.query.dtype}")
    return LayerArguments(
        cache=cache.sectors.data_ptr(),
        num_units=cache.sectors.shape[0] * layout.sector_units(group),
        cache_type=CACHE_TYPES[cache.sectors.dtype],
        io_type=_TYPES[call.query.dtype],
        page_size=layout.page_size,
        heads=call.query.shape[1],
        kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        unit_offset=2 * group.layers.index(call.layer),
        scale=options.scaling,
        window=options.sliding_window or 0,
        softcap=options.softcap or 0.0,
        sinks=0 if sinks is None else sinks.data_ptr(),
        isa=isa,
    )


def _whole_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _strided(tensor: torch.Tensor) -> Strided:
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)
