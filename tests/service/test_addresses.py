"""Addresses: what is accepted, what is local, what is refused."""

from __future__ import annotations

import pytest
from chairlift_service.addresses import TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address", "local"),
    [
        ("127.0.0.1:50051", TcpAddress("127.0.0.1", 50051), True),
        ("127.8.9.10:0", TcpAddress("127.8.9.10", 0), True),
        ("localhost:65535", TcpAddress("localhost", 65535), True),
        ("[::1]:1", TcpAddress("::1", 1), True),
        ("[::ffff:127.0.0.1]:1", TcpAddress("::ffff:127.0.0.1", 1), True),
        ("0.0.0.0:1", TcpAddress("0.0.0.0", 1), False),
        ("[::]:1", TcpAddress("::", 1), False),
        ("10.0.0.1:1", TcpAddress("10.0.0.1", 1), False),
        ("[::ffff:10.0.0.1]:1", TcpAddress("::ffff:10.0.0.1", 1), False),
        ("localhost.example.com:1", TcpAddress("localhost.example.com", 1), False),
        ("unix:/run/c.sock", UnixAddress("/run/c.sock"), True),
        ("unix:relative", UnixAddress("relative"), True),
    ],
)
def test_an_address_is_read_and_written_back(text: str, address: object, local: bool) -> None:
    parsed = parse_address(text)
    assert (parsed, parsed.is_local, str(parsed)) == (address, local, text)


def test_grpcs_other_spelling_of_an_absolute_unix_path_is_the_same_path() -> None:
    assert parse_address("unix:///run/c.sock") == UnixAddress("/run/c.sock")


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":80", "host:port", "host:-1", "host:65536", "host:1.5", "host:\u0661"),
        *("::1:80", "[::1]", "[x]:1", "[127.0.0.1]:1", "a b:1", "http://x:1", "unix:", "unix:a\0b"),
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_address(text)


def test_a_unix_path_has_at_most_107_bytes() -> None:
    assert parse_address("unix:/" + "a" * 106)
    with pytest.raises(ValueError, match="107 bytes"):
        parse_address("unix:/" + "a" * 107)
    with pytest.raises(ValueError, match="107 bytes"):
        parse_address("unix:/" + "é" * 54)
