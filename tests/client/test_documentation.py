"""The examples in docstrings run, against the fake server."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import pkgutil
from types import ModuleType

import chairlift_client
import chairlift_client.manager
import chairlift_client.testing
import pytest
from chairlift_client.testing import FakeServer

MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(chairlift_client.__path__, "chairlift_client.")
    if not module.name.endswith("__main__")
]


def examples(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("module", [m for m in MODULES if examples(m)], ids=lambda m: m.__name__)
def test_the_examples_of_docstrings_run_and_print_what_they_say(module: ModuleType, server: FakeServer) -> None:
    names = {name: getattr(chairlift_client, name) for name in chairlift_client.__all__}
    runner = doctest.DocTestRunner()
    for test in examples(module):
        test.globs.update(names, target=server.target, FakeServer=FakeServer, asyncio=asyncio)
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_the_calls_that_a_newcomer_meets_have_examples() -> None:
    documented = {test.name.rpartition(".")[2] for module in MODULES for test in examples(module)}
    assert documented >= {
        "generate",
        "complete",
        "add_request",
        "add_requests",
        "result",
        "cancel",
        "generate_batch",
        "continuous_batching_context_manager",
        "FakeServer",
        "AsyncClient",
    }
