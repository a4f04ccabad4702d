"""Channel options of the server. gRPC ignores a misspelt option without a word, so tests check the spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Clients may ping every 10 s. The bound lies clearly below, since two clocks that tick alike still jitter.
MIN_PING_INTERVAL_MS: Final = 5_000
# Bounds what a caller can make the service hold in headers; gRPC's own default, written down.
MAX_METADATA_BYTES: Final = 8 * 1024
# A caller whose machine vanished leaves its connection, and its requests, behind: found out after 40 s, not gRPC's 2 h.
KEEPALIVE_TIME_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What may go over a connection, and how long it lives. Seconds; None: no bound."""

    max_message_bytes: int  # in both directions
    max_age: float | None = None  # give or take a tenth (gRPC's own), so that not all come back at once
    max_age_grace: float | None = None
    max_idle: float | None = None


def server_options(limits: ConnectionLimits) -> tuple[tuple[str, int], ...]:
    """Options for `grpc.aio.server(options=...)`."""
    return (
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Two servers must not share a port by mistake: the second is to fail.
        ("grpc.so_reuseport", 0),
        *_milliseconds("grpc.max_connection_age_ms", limits.max_age),
        *_milliseconds("grpc.max_connection_age_grace_ms", limits.max_age_grace),
        *_milliseconds("grpc.max_connection_idle_ms", limits.max_idle),
    )


def _milliseconds(name: str, seconds: float | None) -> tuple[tuple[str, int], ...]:
    return () if seconds is None else ((name, max(1, round(seconds * 1000))),)
