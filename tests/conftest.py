"""Options of all test suites."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the native stress tests run."""
    parser.addoption(
        "--native-records",
        type=int,
        default=40_000,
        help="records that each native stress test sends; 2,000,000 take about a minute",
    )
