"""Parses the command line, runs the command, and turns errors into lines and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from chairlift_client._errors import ChairliftError
from chairlift_client.cli import _access_options, _bench, _chat, _generate, _operate, _service, _tokenize, _top
from chairlift_client.cli._hints import explained
from chairlift_client.cli._output import WrongUseError, print_error

GOOD: Final = 0
REFUSED: Final = 1  # the service said no
WRONG_USE: Final = 2
INTERRUPTED: Final = 130  # what shells report for SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code; wrong use raises SystemExit(2), as argparse does."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.access = _access_options.read_access(options)
        exit_code: int = options.run(options)
    except ChairliftError as error:
        print_error(explained(error, options), as_json=options.json)
        return REFUSED
    except (WrongUseError, ValueError) as error:
        print(f"chairlift {options.command}: {error}", file=sys.stderr)
        return WRONG_USE
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except KeyboardInterrupt:
        return INTERRUPTED
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chairlift", description="Talk to a Chairlift service.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"chairlift {version('chairlift')}")
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _access_options.add_access(common)
    common.add_argument("--json", action="store_true", help="machine-readable output")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add_to in (
        _generate.add_generate,
        _chat.add_chat,
        _bench.add_bench,
        _service.add_health,
        _service.add_info,
        _service.add_cancel,
        _top.add_top,
        _tokenize.add_tokenize,
        _operate.add_flush_prefix_cache,
        _operate.add_pause,
        _operate.add_resume,
        _operate.add_drain,
        _operate.add_stop,
        _operate.add_update_weights,
    ):
        add_to(commands, common)
    return parser
