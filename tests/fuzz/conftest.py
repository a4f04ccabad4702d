"""How long each part runs, and with which seed."""

from __future__ import annotations

import pytest

NUM_PARTS = 5
"""Tests that run for a time: ring and page, requests, worker messages, settings, the service's calls."""


@pytest.fixture
def share_s(pytestconfig: pytest.Config) -> float:
    """Seconds for one part."""
    return float(pytestconfig.getoption("fuzz_seconds")) / NUM_PARTS


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """The seed; a failure names it."""
    number = int(pytestconfig.getoption("fuzz_seed"))
    print(f"seed {number}: pytest --fuzz-seed={number} --fuzz-seconds=... repeats it")
    return number
