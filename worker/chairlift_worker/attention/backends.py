"""The backends by the name a user gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chairlift_worker.attention.base import AttentionBackend
from chairlift_worker.attention.native import NativeAttention
from chairlift_worker.attention.native_kernel import Isa
from chairlift_worker.attention.reference import ReferenceAttention
from chairlift_worker.attention.sdpa import SdpaAttention

BACKENDS: dict[str, Callable[[], AttentionBackend[Any]]] = {
    ReferenceAttention.name: ReferenceAttention,
    SdpaAttention.name: SdpaAttention,
}


def make_backend(name: str, *, isa: Isa = Isa.BEST) -> AttentionBackend[Any]:
    """The backend of that name; `isa` is for the native one. Raises ValueError for an unknown name."""
    if name == NativeAttention.name:
        return NativeAttention(isa=isa)
    try:
        return BACKENDS[name]()
    except KeyError:
        raise ValueError(
            f"unknown attention backend {name!r}; there are {', '.join(sorted([*BACKENDS, NativeAttention.name]))}"
        ) from None
