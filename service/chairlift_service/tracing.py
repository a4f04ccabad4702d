"""Whether requests are traced. What that needs is optional: the extra `otel`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

import structlog

from chairlift_service.requests.request_tracer import RequestTracer

_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MISSING: Final = "traces need the packages of the extra chairlift[otel]"

_log = structlog.get_logger(__name__)


class TracingError(Exception):
    """Traces were asked for and cannot be made. The text is one line that names the setting."""


def make_tracer(endpoint: str | None, environ: Mapping[str, str]) -> RequestTracer | None:
    """The tracer that sends to `endpoint`, or where OpenTelemetry's own variables say; None where nothing says so.

    Those variables may be there for all programs of a machine, so a service that cannot follow them says so and goes
    on. Raises TracingError where `endpoint` asks for the impossible.
    """
    variable = next((name for name in _VARIABLES if environ.get(name)), None)
    if endpoint is None and variable is None:
        return None
    try:
        module = importlib.import_module("chairlift_service.otel")
    except ImportError as error:
        if endpoint is not None:
            raise TracingError(f"otlp_endpoint = {endpoint}: {_MISSING}") from error
        _log.warning(f"no traces: {_MISSING}", variable=variable)
        return None
    tracer: RequestTracer = module.OtelTracer(endpoint=endpoint, environ=environ)
    return tracer
