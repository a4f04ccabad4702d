from __future__ import annotations

import pytest
from chairlift_client import _channel


@pytest.mark.parametrize("target", ["127.0.0.1:50051", "localhost:1", "[::1]:65535", "host.example:80", "unix:/tmp/s"])
def test_addresses_of_the_contract_are_taken_as_they_are(target: str) -> None:
    assert _channel.resolve_target(target) == target


@pytest.mark.parametrize("target", ["localhost", "unix:", ":50051", "host:0", "host:65536", "::1:50051", "http://x:1"])
def test_other_addresses_are_refused_by_name(target: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        _channel.resolve_target(target)


def test_the_environment_names_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_TARGET", raising=False)
    assert _channel.resolve_target() == "127.0.0.1:50051"
    monkeypatch.setenv("CHAIRLIFT_TARGET", "unix:/run/c")
    assert _channel.resolve_target() == "unix:/run/c"
    assert _channel.resolve_target("h:1") == "h:1"


def test_messages_of_16_mib_pass_both_ways() -> None:
    options = dict(_channel.channel_options("h:1"))
    assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == 16 * 2**20


def test_nothing_that_adds_a_lasting_request_is_ever_repeated() -> None:
    config = dict(_channel.channel_options("h:1"))["grpc.service_config"]
    assert '"method": "Generate"' in config
    for never in ("AddRequest", "Complete", "Cancel", "AdminService"):
        assert never not in config
