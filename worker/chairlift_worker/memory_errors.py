"""How it shows that there is no memory."""

from __future__ import annotations

from typing import Final

import torch

# What torch's allocator for a CPU raises is a plain RuntimeError; only its text tells.
_CPU_ALLOCATOR: Final = "DefaultCPUAllocator: "


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this says that there was no memory: Python's and the native code's, a device's, or torch's on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
