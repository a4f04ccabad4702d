"""Channel options of the server. gRPC ignores a misspelt option without a word, so tests check the spelling."""

from __future__ import annotations

from typing import Final

# Clients may ping every 10 s. The bound lies clearly below, since two clocks that tick alike still jitter.
MIN_PING_INTERVAL_MS: Final = 5_000
# Bounds what a caller can make the service hold in headers; gRPC's own default, written down.
MAX_METADATA_BYTES: Final = 8 * 1024


def server_options(*, max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options for `grpc.aio.server(options=...)`; `max_message_bytes` bounds messages in both directions."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.keepalive_permit_without_calls", 1),
        # Two servers must not share a port by mistake: the second is to fail.
        ("grpc.so_reuseport", 0),
    )
