"""Logs of both processes: structlog on standard error, for people in a terminal, as JSON lines otherwise.

Prompts are never logged. Whatever a record holds, it cannot pass for two, nor give a terminal commands: JSON escapes
it, and for people `for_terminal` does.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, Final, TextIO

import structlog

from chairlift_worker.ipc.settings import LogFormat, LogLevel

_TRACEBACK_MARGIN: Final = "  | "


def for_terminal(text: str) -> str:
    """`text` in one line, with escapes for all that is not printable: line ends, control characters, directions."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
        last = [_escaped, structlog.dev.ConsoleRenderer(exception_formatter=_traceback)]
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


def adopt_libraries() -> None:
    """Takes away the handlers that libraries brought along when they were imported.

    Or they write lines of their own beside the records, transformers and huggingface_hub with names out of model files.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True


def _escaped(_logger: Any, _method: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The record with its strings escaped, names included."""
    return {
        for_terminal(name): for_terminal(value) if isinstance(value, str) else value for name, value in record.items()
    }


def _traceback(into: TextIO, error: structlog.typing.ExcInfo) -> None:
    """A traceback whose lines have a margin, so that a line of an exception's text cannot pass for a record."""
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, error)
    lines = plain.getvalue().split("\n")
    into.write("\n" + "\n".join(_TRACEBACK_MARGIN + for_terminal(line) for line in lines if line))
