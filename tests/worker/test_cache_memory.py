"""A cache that cannot be had is refused in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from chairlift_worker.assemble import _cache
from chairlift_worker.setting_log import SettingError
from support.layouts import layout_of


def test_a_cache_for_which_there_is_no_memory_is_named() -> None:
    """More than an address space has room for, so that torch's own allocator says no."""
    config = SimpleNamespace(layout=layout_of(None), num_blocks=2**40)
    with pytest.raises(SettingError, match=r"num_blocks = 1099511627776: there is no memory"):
        _cache(config, SimpleNamespace(dtype=torch.float32))  # type: ignore[arg-type]
