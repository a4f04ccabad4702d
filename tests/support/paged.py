"""Requests as a runner sees them, without a scheduler: tokens, scattered sectors, plans."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
from chairlift_worker.attention.native_kernel import Isa
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.kv.layout import CacheLayout, KvCacheType, make_layout
from chairlift_worker.model import load_model
from chairlift_worker.plan import RowPlan, SampleSpec, StepPlan

from support.decoder_runner import decoder_runner
from support.runners import module_runner

MAX_BLOCKS, MAX_ROWS = 20, 6  # of the decode fast path
GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=0, logprob=False)


@dataclass
class Sequence:
    """One request's tokens and sectors, a table for each group of layers."""

    uid: int
    tokens: array[int]
    tables: tuple[array[int], ...]
    computed: int = 0

    def row(self, num_tokens: int, *, sample: bool = True, num_drafts: int = 0) -> RowPlan:
        """The next tokens as a row, the last ones as drafts; they count as computed from now on."""
        start, self.computed = self.computed, self.computed + num_tokens
        known = self.computed - num_drafts
        return RowPlan(
            uid=self.uid,
            tokens=self.tokens[:known] if num_drafts else self.tokens,
            start=start,
            num_tokens=num_tokens,
            tables=self.tables,
            sample=GREEDY if sample else None,
            drafts=tuple(self.tokens[known : self.computed]),
        )


class Sectors:
    """A shuffled supply of sectors, without any memory: what a window leaves behind is forgotten and poisoned."""

    def __init__(self, layout: CacheLayout, num_sectors: int) -> None:
        self._layout = layout
        order = torch.randperm(num_sectors, generator=torch.Generator().manual_seed(7))
        self._free = array("i", order.tolist())

    def tables(self, num_tokens: int) -> tuple[array[int], ...]:
        """Tables for that many tokens, of sectors in no order."""
        return tuple(self._take(group.sectors_for(num_tokens)) for group in self._layout.groups)

    def _take(self, count: int) -> array[int]:
        assert len(self._free) >= count, "the test needs more sectors"
        taken, self._free = self._free[:count], self._free[count:]
        return taken


class Desk:
    """A runner with a shuffled supply of sectors."""

    def __init__(
        self,
        folder: Path,
        *,
        backend: str = "sdpa",
        page_size: int = 4,
        num_pages: int = 64,
        kv_cache: KvCacheType = "auto",
    ) -> None:
        """`backend` is a name; `native, in place` takes the decode fast path where there are no windows.

        `decoder` is the native decoder with the best instruction set, `decoder AVX2` with another.
        """
        name, _, in_place = backend.partition(", ")
        self.model = load_model(WorkerSettings(model=str(folder), dtype="float32"))
        self.layout = make_layout(self.model.layers, page_size=page_size, kv_cache=kv_cache)
        fast = in_place and not self.model.has_sliding_layers
        blocks, rows = (MAX_BLOCKS, MAX_ROWS) if fast else (0, 0)
        if name.startswith("decoder"):
            isa = Isa[name.removeprefix("decoder").strip() or "BEST"]
            self.runner = decoder_runner(
                self.model,
                self.layout,
                num_sectors=num_pages,
                isa=isa,
                max_blocks_per_request=blocks,
                max_requests=rows,
            )
        else:
            self.runner = module_runner(
                self.model.module,
                self.layout,
                backend=name,
                num_sectors=num_pages,
                max_blocks_per_request=blocks,
                max_requests=rows,
            )
        self._sectors = Sectors(self.layout, num_pages)
        self._uids = 0

    def sequence(self, tokens: list[int]) -> Sequence:
        """A request with sectors for all its tokens, in no order."""
        self._uids += 1
        return Sequence(uid=self._uids, tokens=array("i", tokens), tables=self._sectors.tables(len(tokens)))

    def forget(self, sequence: Sequence) -> None:
        """Takes back what no later token looks at: the entries become -1, and the memory is broken on purpose."""
        for group, table in zip(self.layout.groups, sequence.tables, strict=True):
            for place in range(group.first_needed(sequence.computed)):
                if table[place] >= 0:
                    self.runner.cache.sectors[table[place]] = -1 if self.layout.is_int8 else float("nan")
                table[place] = -1

    def step(self, *rows: RowPlan) -> torch.Tensor:
        """Logits of the rows that sample."""
        return self.runner.forward(StepPlan(step=1, rows=rows))


def some_ids(num_tokens: int, *, seed: int = 0, vocab_size: int = 384) -> list[int]:
    """Random token ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab_size, (num_tokens,), generator=generator).tolist()
