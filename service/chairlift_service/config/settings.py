"""The service's own settings as a user gives them: one source of names, types, bounds and help."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from chairlift_service.gateway import GatewayChoice

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"

PositiveInt = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
ConnectionSeconds = Annotated[float, Meta(ge=0.001, le=2e6)]  # gRPC counts milliseconds in 32 bits


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked of the service."""

    listen: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="address to serve on, HOST:PORT (port 0 picks one) or unix:PATH; repeatable"),
    ] = (DEFAULT_ADDRESS,)
    admin_listen: Annotated[
        str | None, Meta(description="address of the admin service; it is off unless this is set")
    ] = None
    metrics_listen: Annotated[
        str | None,
        Meta(description="address of the metrics, for Prometheus, by HTTP; they are off unless this is set"),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Meta(
            description="where traces of requests go, by OTLP over gRPC; unset: OTEL_EXPORTER_OTLP_ENDPOINT, or nowhere"
        ),
    ] = None
    gateway: Annotated[
        GatewayChoice,
        Meta(description="answer gateways (smg), which speak HTTP; auto: where the extra `gateway` is installed"),
    ] = "auto"
    insecure: Annotated[
        bool,
        Meta(description="serve without encryption on addresses that other machines can reach"),
    ] = False
    tls_cert: Annotated[
        str | None, Meta(description="PEM file with the certificate chain; TCP addresses are encrypted then")
    ] = None
    tls_key: Annotated[str | None, Meta(description="PEM file with the certificate's key, not encrypted")] = None
    tls_client_ca: Annotated[
        str | None, Meta(description="PEM file with the authorities of callers' certificates; callers need one then")
    ] = None
    auth_token_file: Annotated[
        str | None, Meta(description="file with bearer tokens, TOKEN [NAME [ROLE,...]] a line; calls need one then")
    ] = None
    max_connection_age: Annotated[
        ConnectionSeconds | None, Meta(description="seconds after which a connection is replaced; unset: never")
    ] = None
    max_connection_age_grace: Annotated[
        ConnectionSeconds | None,
        Meta(description="seconds that its calls then get to end; unset: as many as they need"),
    ] = None
    max_connection_idle: Annotated[
        ConnectionSeconds | None, Meta(description="seconds after which a connection without calls is closed")
    ] = None
    drain_timeout: Annotated[Seconds, Meta(description="seconds that running requests get to end after SIGTERM")] = 30.0
    start_timeout: Annotated[Seconds, Meta(description="seconds that the worker may take to load the model")] = 600.0
    step_timeout: Annotated[
        Annotated[float, Meta(ge=0.1, le=1e7)],
        Meta(
            description="seconds without a sign of life, with a quarter more for each token of its step, after which "
            "the worker counts as stuck"
        ),
    ] = 60.0
    worker_restart_limit: Annotated[
        Seconds,
        Meta(description="seconds that the service may be without a worker before it gives up; 0: none is replaced"),
    ] = 300.0
    result_ttl: Annotated[
        Seconds, Meta(description="seconds that a result without a reader is kept after its ending")
    ] = 300.0
    result_memory: Annotated[PositiveInt, Meta(description="bytes of finished results kept in all")] = 256 * 2**20
    reader_buffer_tokens: Annotated[
        PositiveInt, Meta(description="tokens that a slow reader may have before it until its request is held")
    ] = 4096
    slow_reader_timeout: Annotated[
        Seconds, Meta(description="seconds that a request may be held for a slow reader, whose stream ends then")
    ] = 60.0
    max_message_bytes: Annotated[
        Annotated[int, Meta(ge=64 * 1024, le=2**31 - 1)],
        Meta(description="largest message taken or sent, in bytes; a delta can take half of the least allowed"),
    ] = 16 * 2**20
    max_waiting_requests: Annotated[
        PositiveInt, Meta(description="requests that may wait for their first step; more are refused")
    ] = 1024
    max_waiting_tokens: Annotated[
        PositiveInt, Meta(description="prompt tokens that may wait for their first step; more are refused")
    ] = 4 * 2**20
    model_defaults: Annotated[
        bool, Meta(description="let the model's generation_config.json fill in what a request leaves unset")
    ] = True
