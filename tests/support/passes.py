"""Runners whose passes are compiled or captured."""

from __future__ import annotations

from pathlib import Path

from chairlift_worker.pass_config import PassConfig

from support.paged import MAX_BLOCKS, MAX_ROWS, Desk
from support.runners import module_runner


class PassDesk(Desk):
    """A desk over the module, by native attention unless another backend is named, run as the config says."""

    def __init__(
        self,
        folder: Path,
        passes: PassConfig,
        *,
        backend: str = "native",
        page_size: int = 4,
        num_pages: int = 200,
        num_inputs: int = 1,
    ) -> None:
        super().__init__(folder, backend=backend, page_size=page_size, num_pages=num_pages)
        fast = backend == "native" and not self.model.has_sliding_layers
        self.runner = module_runner(
            self.model.module,
            self.layout,
            backend=backend,
            num_sectors=num_pages,
            max_blocks_per_request=MAX_BLOCKS if fast else 0,
            max_requests=MAX_ROWS,
            passes=passes,
            num_inputs=num_inputs,
        )
