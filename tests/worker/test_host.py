"""What is read of the machine."""

import os
from pathlib import Path

import pytest
from chairlift_worker.host import free_memory, num_cores


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    return tmp_path


def test_without_a_control_group_it_is_what_the_machine_has(machine: Path) -> None:
    assert free_memory(root=machine).num_bytes == 1000 * 1024


@pytest.mark.parametrize(
    ("limit", "used"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_a_control_group_bounds_it(machine: Path, limit: str, used: str) -> None:
    (machine / "sys/fs/cgroup" / limit).write_text("500000\n")
    (machine / "sys/fs/cgroup" / used).write_text("200000\n")
    memory = free_memory(root=machine)
    assert memory.num_bytes == 300_000
    assert "cgroup" in memory.reason


def test_a_group_without_limit_bounds_nothing(machine: Path) -> None:
    (machine / "sys/fs/cgroup/memory.max").write_text("max\n")
    (machine / "sys/fs/cgroup/memory.current").write_text("200000\n")
    assert free_memory(root=machine).num_bytes == 1000 * 1024


def test_a_group_over_its_limit_leaves_nothing(machine: Path) -> None:
    (machine / "sys/fs/cgroup/memory.max").write_text("100\n")
    (machine / "sys/fs/cgroup/memory.current").write_text("200\n")
    assert free_memory(root=machine).num_bytes == 0


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "199999 100000"}, 1),  # two threads would take turns to wait
        ({"cpu.max": "6400000 100000"}, 64),
        ({"cpu.max": "1000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({}, None),
    ],
)
def test_threads_are_no_more_than_the_group_pays_for(machine: Path, files: dict[str, str], most: int | None) -> None:
    (machine / "sys/fs/cgroup/cpu").mkdir()
    for name, text in files.items():
        (machine / "sys/fs/cgroup" / name).write_text(f"{text}\n")
    has = len(os.sched_getaffinity(0))
    assert num_cores(root=machine) == (has if most is None else min(has, most))


def test_this_machine_can_be_read() -> None:
    assert free_memory().num_bytes > 0
    assert num_cores() >= 1
