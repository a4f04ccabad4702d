"""Which type the model computes in."""

from __future__ import annotations

from pathlib import Path

import torch

from chairlift_worker.model.errors import ModelError

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86, x86, Arm


def choose_dtype(asked: str, *, cpu_flags: frozenset[str] | None = None) -> tuple[torch.dtype, str]:
    """The type and the reason for it. Raises ModelError for an unknown name."""
    if asked != "auto":
        if asked not in _TYPES:
            raise ModelError(f"dtype = {asked}: not one of auto, {', '.join(_TYPES)}")
        return _TYPES[asked], "as set"
    native = sorted(_NATIVE_BFLOAT16 & (read_cpu_flags() if cpu_flags is None else cpu_flags))
    if native:
        return torch.bfloat16, f"auto: this processor computes it natively ({', '.join(native)})"
    return torch.float32, "auto: this processor does not compute bfloat16 natively"


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The first processor's feature flags; empty where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()
