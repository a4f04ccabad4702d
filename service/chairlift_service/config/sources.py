"""Where settings come from: command-line flags, environment variables, a TOML file."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NoReturn

from msgspec import NODEFAULT

from chairlift_service.config.fields import ConfigError, Field, one_line

ENV_PREFIX: Final = "CHAIRLIFT_"
# Variables with the prefix that are not settings: the file's name, and what other programs of Chairlift read.
OTHER_VARIABLES: Final = frozenset({"CHAIRLIFT_CONFIG", "CHAIRLIFT_TARGET", "CHAIRLIFT_TOKEN"})
ALIASES: Final[Mapping[str, str]] = {"block_size": "page_size"}  # deprecated name: the setting


@dataclass(frozen=True, slots=True)
class Given:
    """A value that a source gives for a setting."""

    value: Any
    origin: str  # the flag, the variable, or the file


@dataclass(frozen=True, slots=True)
class Source:
    """All that one source gives, by setting; aliases are already resolved."""

    given: Mapping[str, Given]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What the command line says."""

    source: Source
    config: str | None
    print_config: bool


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigError, so that they are one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_flags(argv: Sequence[str], groups: Mapping[str, Sequence[Field]]) -> CommandLine:
    """Reads the command line. Raises ConfigError; SystemExit after `--help`."""
    parser = _Parser(
        prog="chairlift-serve",
        description="gRPC service for LLM text generation.",
        epilog=f"Every setting is also an environment variable ({ENV_PREFIX}NAME) and a key of the TOML file. "
        "Flags win over the environment, the environment over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"chairlift-serve {version('chairlift')}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="print the settings and where each is from, exit")
    for title, fields in groups.items():
        group = parser.add_argument_group(title)
        for field in fields:
            _add_flag(group, field)
    aliases = parser.add_argument_group("deprecated names")
    for alias, name in ALIASES.items():
        aliases.add_argument(_flag(alias), metavar="VALUE", help=f"use {_flag(name)}")
    parsed = vars(parser.parse_args(list(argv)))
    config, print_config = parsed.pop("config", None), parsed.pop("print_config", False)
    source = _source({name: Given(value, _spelled(name, value)) for name, value in parsed.items()}, name_of=_flag)
    return CommandLine(source=source, config=config, print_config=print_config)


def parse_environment(environ: Mapping[str, str], names: Iterable[str]) -> Source:
    """Reads CHAIRLIFT_... variables; see `listed` for lists. Raises ConfigError for a name it does not know."""
    known = {*names, *ALIASES}
    given = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in known or variable != _variable(name):
            raise ConfigError(f"unknown setting in the environment: {variable} = {one_line(value)}")
        given[name] = Given(value, variable)
    return _source(given, name_of=_variable)


def listed(value: str) -> list[str]:
    """A variable's list: parts between commas, or a JSON array of strings where parts have commas of their own."""
    if value.lstrip().startswith('["'):
        try:
            parts = json.loads(value)
        except ValueError:
            parts = None
        if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
            return parts
    return [part.strip() for part in value.split(",")]


def parse_file(path: str, names: Iterable[str]) -> Source:
    """Reads a TOML file: one key for each setting, no tables. Raises ConfigError."""
    known = {*names, *ALIASES}
    try:
        entries = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config = {one_line(path)}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise ConfigError(f"config = {one_line(path)}: {' '.join(str(error).split())}") from None
    for name, value in entries.items():
        if name not in known:
            raise ConfigError(f"unknown setting in {one_line(path)}: {one_line(name)} = {one_line(value)}")
    return _source({name: Given(value, path) for name, value in entries.items()}, name_of=str)


def _add_flag(group: argparse._ArgumentGroup, field: Field) -> None:
    text = field.help.replace("%", "%%")
    if field.default is NODEFAULT:
        text += " (required)"
    elif field.default is not None:
        text += f" (default: {one_line(field.default).replace('%', '%%')})"
    if field.is_bool:
        group.add_argument(field.flag, action=argparse.BooleanOptionalAction, help=text)
    elif field.takes_pair:  # alone it is a switch
        group.add_argument(field.flag, nargs="?", const="true", metavar="VALUE", help=text)
    else:
        metavar = "{" + ",".join(field.choices) + "}" if field.choices else "VALUE"
        group.add_argument(field.flag, action="append" if field.is_list else "store", metavar=metavar, help=text)


def _source(given: dict[str, Given], *, name_of: Any) -> Source:
    """Puts aliased settings under their own name."""
    warnings = []
    for alias, name in ALIASES.items():
        if alias in given:
            if name in given:
                raise ConfigError(
                    f"{alias} = {one_line(given[alias].value)} and {name} = {one_line(given[name].value)} "
                    f"(from {given[name].origin}) name the same setting"
                )
            given[name] = given.pop(alias)
            warnings.append(f"{name_of(alias)} is a deprecated name: use {name_of(name)}")
    return Source(given, tuple(warnings))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spelled(name: str, value: Any) -> str:
    return "--no-" + name.replace("_", "-") if value is False else _flag(name)


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()
