"""Options that give an answer a form."""

from __future__ import annotations

import argparse
from pathlib import Path

from chairlift_client._constraint import Constraint
from chairlift_client.cli._output import WrongUseError


def add_constraint(parser: argparse.ArgumentParser) -> None:
    """Add them; at most one can be given."""
    forms = parser.add_argument_group("form of the answer").add_mutually_exclusive_group()
    forms.add_argument("--json-schema", metavar="FILE", help="JSON that the schema in this file allows")
    forms.add_argument("--json-object", action="store_true", help="a JSON object")
    forms.add_argument("--regex", metavar="PATTERN", help="what this regular expression matches as a whole")
    forms.add_argument("--grammar", metavar="FILE", help="what the grammar in this file derives, Lark's or GBNF's form")
    forms.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeatable")


def read_constraint(options: argparse.Namespace) -> Constraint | None:
    """What they say; None if nothing. Raises WrongUseError for a file that cannot be read."""
    if options.json_schema is not None:
        return Constraint.json_schema(_read(options.json_schema))
    if options.json_object:
        return Constraint.json_object()
    if options.regex is not None:
        return Constraint.regex(options.regex)
    if options.grammar is not None:
        return Constraint.grammar(_read(options.grammar))
    return Constraint.choices(options.choice) if options.choice else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise WrongUseError(f"cannot read {path}: {error}") from None
