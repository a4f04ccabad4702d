"""Requests as a runner sees them, without a scheduler: tokens, scattered pages, plans."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

import torch
from chairlift_worker.attention.backends import make_backend
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model import load_model
from chairlift_worker.plan import RowPlan, SampleSpec, StepPlan
from chairlift_worker.runner import Runner

GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=0, logprob=False)


@dataclass
class Sequence:
    """One request's tokens and pages."""

    uid: int
    tokens: array[int]
    pages: array[int]
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def row(self, num_tokens: int, *, sample: bool = True) -> RowPlan:
        """The next tokens as a row; they count as computed from now on."""
        start, self.computed = self.computed, self.computed + num_tokens
        spec = GREEDY if sample else None
        return RowPlan(
            uid=self.uid, tokens=self.tokens, start=start, num_tokens=num_tokens, pages=self.pages, sample=spec
        )


class Desk:
    """A runner with a shuffled supply of pages."""

    def __init__(self, folder: Path, *, backend: str = "sdpa", page_size: int = 4, num_pages: int = 64) -> None:
        self.model = load_model(WorkerSettings(model=str(folder), dtype="float32"))
        self.runner = Runner(
            model=self.model.module,
            layers=self.model.layers,
            backend=make_backend(backend),
            page_size=page_size,
            num_pages=num_pages,
        )
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
        self._free = array("i", order.tolist())
        self._page_size = page_size
        self._uids = 0

    def sequence(self, tokens: list[int]) -> Sequence:
        """A request with pages for all its tokens, in no order."""
        self._uids += 1
        num_pages = -(-len(tokens) // self._page_size)
        pages, self._free = self._free[:num_pages], self._free[num_pages:]
        return Sequence(uid=self._uids, tokens=array("i", tokens), pages=pages)

    def step(self, *rows: RowPlan) -> torch.Tensor:
        """Logits of the rows that sample."""
        return self.runner.forward(StepPlan(step=1, rows=rows))


def some_ids(num_tokens: int, *, seed: int = 0, vocab_size: int = 384) -> list[int]:
    """Random token ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab_size, (num_tokens,), generator=generator).tolist()
