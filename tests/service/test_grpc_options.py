"""Server options: gRPC ignores one that it does not know, so the spelling is looked up in the library itself."""

from __future__ import annotations

from pathlib import Path

import grpc._cython.cygrpc
import pytest
from chairlift_service.grpc_options import server_options

OPTIONS = dict(server_options(max_message_bytes=123_456))


@pytest.fixture(scope="module")
def library() -> bytes:
    return Path(grpc._cython.cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", OPTIONS)
def test_grpc_knows_the_option(library: bytes, name: str) -> None:
    assert name.encode() + b"\0" in library
    assert name.encode() + b"x\0" not in library


def test_messages_are_bounded_alike_in_both_directions() -> None:
    assert OPTIONS["grpc.max_receive_message_length"] == OPTIONS["grpc.max_send_message_length"] == 123_456


def test_pings_every_ten_seconds_are_allowed_without_calls_too() -> None:
    assert OPTIONS["grpc.http2.min_ping_interval_without_data_ms"] < 10_000
    assert OPTIONS["grpc.keepalive_permit_without_calls"] == 1
