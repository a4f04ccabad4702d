"""What this machine lets this process have."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60  # cgroup v1 writes a number of about this size where there is no limit


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that this process can still take, and what bounds it."""

    num_bytes: int
    reason: str

    def shared_by(self, number: int) -> FreeMemory:
        """What each of so many processes can take."""
        if number == 1:
            return self
        return FreeMemory(self.num_bytes // number, f"the share of one of {number} ranks of what is {self.reason}")


def free_memory(*, root: Path = Path("/")) -> FreeMemory:
    """The smaller of what the machine has available and what the control group leaves.

    `root` is there for tests. Sources: proc(5) MemAvailable; cgroups(7), versions 2 and 1.
    """
    machine = FreeMemory(_available_bytes(root / "proc/meminfo"), "available on this machine")
    bounds = [machine]
    for limit, used, version in (
        ("memory.max", "memory.current", 2),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", 1),
    ):
        base = root / _CGROUP.relative_to("/")
        most, now = _number(base / limit), _number(base / used)
        if most is not None and now is not None and most < _NO_LIMIT:
            bounds.append(FreeMemory(max(0, most - now), f"left of the cgroup (v{version}) limit of {most} bytes"))
    return min(bounds, key=lambda bound: bound.num_bytes)


def num_cores(*, root: Path = Path("/")) -> int:
    """Cores that this process may run on, at most as many as its control group pays for, rounded down.

    Threads beyond that make every step wait for those that are not let run. `root` is there for tests. Sources:
    sched_getaffinity(2); cgroups(7), cpu.max in version 2, cpu.cfs_quota_us and cpu.cfs_period_us in version 1.
    """
    cores = len(os.sched_getaffinity(0))
    base = root / _CGROUP.relative_to("/")
    quota, period = _quota(base / "cpu.max") or (
        _number(base / "cpu/cpu.cfs_quota_us"),
        _number(base / "cpu/cpu.cfs_period_us"),
    )
    if quota is None or not period:
        return cores
    return max(1, min(cores, quota // period))


def _quota(file: Path) -> tuple[int, int] | None:
    """`QUOTA PERIOD` in microseconds; None where there is no file, or no quota."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return (int(quota), int(period)) if quota.isdigit() else None


def _available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} names no MemAvailable")


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no file, or it says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
