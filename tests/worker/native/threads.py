"""Prints how many threads the process has after torch's parallel work, and after the native attention's as well."""

from __future__ import annotations

from pathlib import Path

import torch
from chairlift_worker.attention.native_kernel import Isa, shares_torch_threads
from support.pages import Geometry, Paged, make_rows


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


torch.set_num_threads(3)
a = torch.randn(600, 600)
(a @ a).exp().sum()
torch.ones(1 << 22).exp()
before = num_threads()
geometry = Geometry(group=3, kv_heads=2, head_dim=64, page_size=16)
paged = Paged(geometry, make_rows(geometry, [(2000, 1)] * 4))
for _ in range(20):
    paged.attend(isa=Isa.BEST, threads=3)
    torch.ones(1 << 22).exp()
print(shares_torch_threads(), before, num_threads())
