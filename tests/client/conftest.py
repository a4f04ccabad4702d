from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from chairlift_client.testing import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A fake service on a Unix socket of its own."""
    with tempfile.TemporaryDirectory(prefix="cl-") as folder, FakeServer(f"unix:{folder}/s") as fake:
        yield fake
