"""Options of all test suites."""

from __future__ import annotations

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long some suites take, and which clients run."""
    parser.addoption(
        "--native-records",
        type=int,
        default=40_000,
        help="records that each native stress test sends; 2,000,000 take about a minute",
    )
    parser.addoption(
        "--workloads",
        type=int,
        default=0,
        help="random workloads for the whole engine; 0: the usual ones, the same each time",
    )
    parser.addoption("--fuzz-seconds", type=float, default=20.0, help="how long tests/fuzz runs, all of it together")
    parser.addoption("--fuzz-seed", type=int, default=1, help="the random numbers of tests/fuzz")
    parser.addoption(
        "--kills",
        type=int,
        default=3,
        help="how often the worker is killed under 64 streams; each takes some ten seconds",
    )
    parser.addoption("--soak-seconds", type=int, default=20, help="how long the sizes of the processes are watched")
    parser.addoption("--chaos-seconds", type=int, default=45, help="how long random faults meet random callers")
    parser.addoption("--full", action="store_true", help="with the tests that `make test` leaves out")
    parser.addoption(
        "--every-language",
        action="store_true",
        help="fail, instead of skipping, where what a client in another language needs is not installed",
    )


def pytest_configure() -> None:
    """Lets Ctrl-C reach the programs that tests start, also where tests run in the background of a shell.

    Such a shell has its children ignore it, which a program inherits from the one that starts it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `full`, unless asked for: more states and modes of what shorter tests show, too."""
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]
