"""How commands print."""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections.abc import Callable
from typing import Any, TypeAlias

from google.protobuf import json_format

from chairlift_client._errors import ChairliftError

# argparse has no public name for what add_subparsers returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 # so its own name it is


class WrongUseError(Exception):
    """What was asked makes no sense; the message says why."""


def add_command(
    commands: Commands,
    common: argparse.ArgumentParser,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    """Add a command that `run` carries out; its options are added to what is returned."""
    parser = commands.add_parser(name, parents=[common], help=summary, description=summary, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def to_dict(message: Any) -> dict[str, Any]:
    """Proto3 JSON with the proto's field names; fields without presence always shown, so that a reader finds them."""
    fields: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def print_json(value: object) -> None:
    """One line of JSON, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def write_text(text: str) -> None:
    """A model's text on standard output, at once.

    In a terminal control characters become U+FFFD, but for line ends and tabs: a model may write what moves the cursor,
    changes the title or answers for the user. A file or pipe gets the text as it is.
    """
    sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def for_terminal(text: str) -> str:
    """The text without what a terminal would obey; see `write_text`."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def print_error(error: ChairliftError, *, as_json: bool) -> None:
    """Tell on standard error, in one line, what the service said."""
    if not as_json:
        print(f"chairlift: {' '.join(str(error).split())}", file=sys.stderr)
        return
    line: dict[str, object] = {"status": error.code.name, "reason": error.reason or "", "message": error.message}
    if error.field_violations:
        line["field_violations"] = [{"field": v.field, "description": v.description} for v in error.field_violations]
    if error.retry_after is not None:
        line["retry_after"] = error.retry_after
    print(json.dumps(line, ensure_ascii=False), file=sys.stderr)
