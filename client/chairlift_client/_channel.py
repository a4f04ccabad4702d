"""Where the service is, and how a channel to it is set up."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Final

DEFAULT_TARGET: Final = "127.0.0.1:50051"
TARGET_VARIABLE: Final = "CHAIRLIFT_TARGET"
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

_HOST_PORT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
_LOOPBACK: Final = re.compile(r"(localhost|127\.[0-9.]+|\[::1\]):")

# Read-only calls may always be repeated. So may a Generate that was refused before it was accepted: the service sends
# initial metadata with `accepted`, and gRPC retries nothing after that; the attempt that got lost on the way is
# cancelled by its broken call. Complete has no `accepted` to tell the two apart, and what AddRequest adds lives on,
# so neither is ever repeated.
_RETRY: Final = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
}
_SERVICE_CONFIG: Final = {
    "methodConfig": [
        {
            "name": [
                {"service": "chairlift.v1.GenerationService", "method": "Generate"},
                {"service": "chairlift.v1.TextService"},
                {"service": "chairlift.v1.InfoService"},
                {"service": "grpc.health.v1.Health"},
            ],
            "retryPolicy": _RETRY,
        }
    ]
}


def resolve_target(target: str | None = None) -> str:
    """The address to call: `target`, else CHAIRLIFT_TARGET, else 127.0.0.1:50051.

    Addresses are `HOST:PORT` or `unix:PATH`. Raises ValueError for anything else.
    """
    chosen = target or os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET
    if chosen.startswith("unix:"):
        if len(chosen) > len("unix:"):
            return chosen
    elif (match := _HOST_PORT.fullmatch(chosen)) and 0 < int(match[2]) < 65536:
        return chosen
    raise ValueError(f"not an address: {chosen!r} (expected HOST:PORT or unix:PATH)")


def is_local(target: str) -> bool:
    """Whether what is sent to `target`, an address from `resolve_target`, stays in this machine."""
    return target.startswith("unix:") or _LOOPBACK.match(target) is not None


def channel_options(target: str) -> list[tuple[str, Any]]:
    """Options of gRPC for a channel to `target`, an address from `resolve_target`."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A peer that vanished without a word is noticed after half a minute, while calls are open.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        # gRPC's own waits up to two minutes between attempts to connect: too long for a neighbour that restarts.
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if _LOOPBACK.match(target):
        options.append(("grpc.enable_http_proxy", 0))
    return options
