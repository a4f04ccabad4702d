"""Logs of both processes: structlog on standard error, for people in a terminal, as JSON lines otherwise.

Prompts are never logged.
"""

from __future__ import annotations

import logging
import sys

import structlog

from chairlift_worker.ipc.settings import LogFormat, LogLevel


def setup_logging(*, level: LogLevel = "info", log_format: LogFormat = "auto") -> None:
    """Sets logging up for this process, structlog's and the standard library's alike.

    `auto` is human in a terminal, JSON otherwise.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # Tracebacks without local variables: those may hold prompts.
    last: list[structlog.typing.Processor]
    if log_format == "human" or (log_format == "auto" and sys.stderr.isatty()):
        last = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
