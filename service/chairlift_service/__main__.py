"""`chairlift-serve`: reads the settings, serves, and says in one line on standard error why it could not."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read on import: what gRPC's core logs is neither JSON nor one line

import structlog
from chairlift_worker.ipc.logs import for_terminal, setup_logging

from chairlift_service.app import ServiceFailedError, run
from chairlift_service.config import ConfigError, check_model, load
from chairlift_service.listeners import ListenError
from chairlift_service.tracing import TracingError
from chairlift_service.watched import FileError
from chairlift_service.workers.supervisor import WorkerStartError
from chairlift_service.workers.worker import COMMAND

EXIT_FAILED = 1
EXIT_WRONG_USE = 2


def main(argv: Sequence[str] | None = None, *, worker_command: Sequence[str] = COMMAND) -> int:
    """The program; returns its exit code. `worker_command` replaces the worker's program, for tests."""
    try:
        configuration = load(sys.argv[1:] if argv is None else argv, os.environ)
        if not configuration.print_config:
            check_model(configuration)
    except ConfigError as error:
        return _fail(str(error), EXIT_WRONG_USE)
    if configuration.print_config:
        print(configuration)  # noqa: T201 - what was asked for
        return 0
    setup_logging(level=configuration.worker.log_level, log_format=configuration.worker.log_format)
    for warning in configuration.warnings:
        structlog.get_logger(__name__).warning(warning)
    try:
        return asyncio.run(run(configuration, worker_command=worker_command))
    except (FileError, ListenError, TracingError, WorkerStartError, ServiceFailedError, OSError) as error:
        return _fail(str(error), EXIT_FAILED)


def _fail(text: str, code: int) -> int:
    print(f"chairlift-serve: {for_terminal(text)}", file=sys.stderr, flush=True)  # noqa: T201 - the one line
    return code


if __name__ == "__main__":
    sys.exit(main())
