"""The native attention kernel beside torch's gather and scaled_dot_product_attention, and beside the memory.

usage: attention_kernel.py [--rows 1 8 32] [--context 128 512 2048 8192] [--threads 1 2] [--types bfloat16 float32 int8]
                           [--heads 9] [--kv-heads 3] [--head-dim 64] [--page-size 16] [--json FILE]

Decode lines: GB/s of keys and values read, and their share of what a plain sum over memory reads in the same run.
Layers are taken in turn so that no cache level keeps the pages from one call to the next. Prefill lines: a chunk of 512
tokens behind others, thousand tokens a second. Ratio: time of torch over time of the kernel. Each time is the shortest
of many: whatever else the machine does only ever adds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from chairlift_worker.attention.native_kernel import ElementType, LayerArguments, NativeLayer, NativeStep, Strided
from torch.nn.functional import scaled_dot_product_attention

MEMORY_BYTES = 256 << 20  # taken by the pages of all layers together, at least: many times the last-level cache
CHUNK = 512
SCALE_BYTES = 4  # behind each head of an int8 cache


@dataclass(frozen=True)
class Type:
    """Of a cache, and of the queries and outputs with it."""

    cache: torch.dtype
    element: ElementType
    io: torch.dtype
    io_element: ElementType
    more: int = 0  # elements that a head has beside its own


TYPES = {
    "bfloat16": Type(torch.bfloat16, ElementType.BFLOAT16, torch.bfloat16, ElementType.BFLOAT16),
    "float32": Type(torch.float32, ElementType.FLOAT32, torch.float32, ElementType.FLOAT32),
    "int8": Type(torch.int8, ElementType.INT8, torch.bfloat16, ElementType.BFLOAT16, SCALE_BYTES),
}


@dataclass(frozen=True)
class Shape:
    """What is attended to."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: int
    start: int  # tokens before this step
    num_tokens: int  # of each row in this step

    @property
    def context(self) -> int:
        """Of each row, this step's tokens included."""
        return self.start + self.num_tokens

    @property
    def pages(self) -> int:
        """Of each row."""
        return -(-self.context // self.page_size)

    @property
    def type(self) -> Type:
        """That its name says."""
        return TYPES[self.dtype]

    @property
    def stored_dim(self) -> int:
        """Elements of a head in the cache."""
        return self.head_dim + self.type.more

    @property
    def kv_bytes(self) -> int:
        """Keys and values that a layer must read."""
        return 2 * self.rows * self.context * self.kv_heads * self.stored_dim * self.type.cache.itemsize


class Bench:
    """A cache of several layers and both ways through it."""

    def __init__(self, shape: Shape, threads: int) -> None:
        self._shape = shape
        self._num_layers = max(1, -(-MEMORY_BYTES // shape.kv_bytes))
        num_units = 2 * self._num_layers * shape.rows * shape.pages
        self._cache = _stored(
            torch.randn((min(num_units, 1 << 14), shape.page_size, shape.kv_heads, shape.head_dim)), shape.type
        ).repeat(-(-num_units // (1 << 14)), 1, 1, 1)[:num_units]
        order = torch.randperm(shape.rows * shape.pages).view(shape.rows, shape.pages)
        self._tables = (order * 2 * self._num_layers).to(torch.int32)
        tokens = shape.rows * shape.num_tokens
        self._query = torch.randn((tokens, shape.heads, shape.head_dim), dtype=shape.type.io)
        self._new = torch.randn((tokens, shape.kv_heads, shape.head_dim), dtype=shape.type.io)
        self._out = torch.empty_like(self._query)
        self._first = torch.arange(0, tokens + 1, shape.num_tokens, dtype=torch.int32)
        self._start = torch.full((shape.rows,), shape.start, dtype=torch.int32)
        self._step = NativeStep(
            row_first=self._first.data_ptr(),
            row_start=self._start.data_ptr(),
            tables=self._tables.data_ptr(),
            table_stride=shape.pages,
            num_rows=shape.rows,
            num_threads=threads,
        )
        self._layers = [NativeLayer(self._arguments(layer)) for layer in range(self._num_layers)]
        positions = torch.arange(shape.context)
        self._pages = self._tables[:, positions // shape.page_size].long()
        self._slots = (positions % shape.page_size).expand_as(self._pages)

    def _arguments(self, layer: int) -> LayerArguments:
        s = self._shape
        return LayerArguments(
            cache=self._cache.data_ptr(),
            num_units=self._cache.shape[0],
            cache_type=s.type.element,
            io_type=s.type.io_element,
            page_size=s.page_size,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            unit_offset=2 * layer,
            scale=s.head_dim**-0.5,
        )

    def native(self, turn: int) -> None:
        """One layer by the kernel."""
        self._layers[turn % self._num_layers].attend(
            self._step,
            query=_strided(self._query),
            key=_strided(self._new),
            value=_strided(self._new),
            out=_strided(self._out),
        )

    def torch(self, turn: int) -> None:
        """One layer by gathering the context and torch's attention; the new tokens are taken to be there already."""
        s = self._shape
        units = self._pages + 2 * (turn % self._num_layers)
        slots = units * s.page_size + self._slots
        flat = self._cache.view(-1, s.kv_heads, s.stored_dim)
        key, value = (
            _restored(flat.index_select(0, at.flatten()), s.type)
            .view(s.rows, s.context, s.kv_heads, s.head_dim)
            .transpose(1, 2)
            for at in (slots, slots + s.page_size)
        )
        query = self._query.view(s.rows, s.num_tokens, s.heads, s.head_dim)
        if s.num_tokens == 1:  # the heads of a group are the query tokens of one head
            grouped = query.view(s.rows, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
            scaled_dot_product_attention(grouped, key, value)
            return
        mask = torch.arange(s.context)[None, :] <= torch.arange(s.start, s.context)[:, None]
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        group = s.heads // s.kv_heads
        scaled_dot_product_attention(
            query.transpose(1, 2),
            key.repeat_interleave(group, dim=1),
            value.repeat_interleave(group, dim=1),
            attn_mask=None if s.start == 0 else bias,
            is_causal=s.start == 0,
        )


def _stored(heads: torch.Tensor, kind: Type) -> torch.Tensor:
    """Heads (..., dim) as the cache holds them."""
    if not kind.more:
        return heads.to(kind.cache)
    scale = torch.full((*heads.shape[:-1], 1), 4 / 127)
    return torch.cat([(heads / scale).clamp(-127, 127).round().to(torch.int8), scale.view(torch.int8)], dim=-1)


def _restored(heads: torch.Tensor, kind: Type) -> torch.Tensor:
    """What torch's attention takes, of heads (..., dim) in the cache."""
    if not kind.more:
        return heads
    scale = heads[..., -kind.more :].contiguous().view(torch.float32)
    return (heads[..., : -kind.more] * scale).to(kind.io)


def _strided(tensor: torch.Tensor) -> Strided:
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


def seconds(call: Callable[[int], None], *, at_least_s: float = 0.4) -> float:
    """Shortest time of a call."""
    for turn in range(2):
        call(turn)
    times: list[float] = []
    while len(times) < 7 or sum(times) < at_least_s:
        begin = time.perf_counter()
        call(len(times) + 2)
        times.append(time.perf_counter() - begin)
    return min(times)


def memory_gb_s() -> float:
    """What torch's sum over a large tensor reads."""
    data = torch.ones(MEMORY_BYTES // 4)
    return MEMORY_BYTES / seconds(lambda _: data.sum()) / 1e9


def measure(shape: Shape, threads: int, memory: float) -> dict[str, object]:
    """One line of the table."""
    bench = Bench(shape, threads)
    native, torch_s = seconds(bench.native), seconds(bench.torch)
    line: dict[str, object] = asdict(shape) | {"threads": threads, "us": native * 1e6, "ratio": torch_s / native}
    if shape.num_tokens == 1:
        rate = shape.kv_bytes / native / 1e9
        return line | {"gb_s": rate, "of_memory": rate / memory}
    return line | {"ktok_s": shape.rows * shape.num_tokens / native / 1e3}


def show(line: dict[str, object]) -> str:
    """The line for people."""
    kind = "decode " if line["num_tokens"] == 1 else "prefill"
    speed = (
        f"{line['gb_s']:6.1f} GB/s {line['of_memory']:5.0%} of memory"
        if "gb_s" in line
        else f"{line['ktok_s']:6.1f} ktok/s               "
    )
    return (
        f"{kind} {line['dtype']:8} threads {line['threads']} rows {line['rows']:3} before {line['start']:5}  "
        f"{line['us']:9.1f} us  {speed}  {line['ratio']:5.1f}x torch"
    )


def main() -> None:
    """Prints the table, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--prefill", type=int, nargs="*", default=[0, 1536], help="tokens before the chunk")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=["bfloat16", "float32"])
    for name, default in (("heads", 9), ("kv-heads", 3), ("head-dim", 64), ("page-size", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fixed = {name: getattr(arguments, name) for name in ("heads", "kv_heads", "head_dim", "page_size")}
    lines = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        memory = memory_gb_s()
        print(f"memory, {threads} threads: {memory:.1f} GB/s")
        for dtype in arguments.types:
            steps = [(rows, context - 1, 1) for context in arguments.context for rows in arguments.rows]
            steps += [(1, start, CHUNK) for start in arguments.prefill]
            for rows, start, num_tokens in steps:
                shape = Shape(dtype=dtype, rows=rows, start=start, num_tokens=num_tokens, **fixed)
                lines.append(measure(shape, threads, memory))
                print(show(lines[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
