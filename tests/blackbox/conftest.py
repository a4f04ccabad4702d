"""What tests of the real service share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chairlift_client import Client
from support.idle import assert_idle
from support.live_server import LiveServer


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    """A client of the file's own `server`. Whatever a test did, nothing of it may stay."""
    with Client(server.target) as client:
        yield client
    assert_idle(server)
