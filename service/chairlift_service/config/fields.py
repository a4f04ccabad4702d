"""Settings structs as a list of fields: what flags, environment, TOML keys and help are made of."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec


class ConfigError(Exception):
    """A setting is wrong. The text is one line that names setting, value and where the value came from."""


@dataclass(frozen=True, slots=True)
class Field:
    """One setting."""

    name: str
    hint: Any  # its annotated type, which msgspec.convert takes
    help: str
    default: Any  # msgspec.NODEFAULT where it is required

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        """Whether it is a switch."""
        return _plain(self.hint) is bool

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return typing.get_origin(_plain(self.hint)) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """Its values, where they are a closed list."""
        plain = _plain(self.hint)
        return typing.get_args(plain) if typing.get_origin(plain) is Literal else ()

    @property
    def takes_pair(self) -> bool:
        """Whether a pair of values is one of the things that it takes."""
        return any(typing.get_origin(part) is tuple for part in typing.get_args(_plain(self.hint)))

    def parse(self, value: Any, *, origin: str, text: bool) -> Any:
        """The setting's value from what `origin` says.

        `text`: the source has only strings (flags, environment), so "4" may be a number; elsewhere types must fit.
        Raises ConfigError.
        """
        if self.is_list and isinstance(value, str):
            value = [value]
        if self.takes_pair and text and "," in value:
            value = [part.strip() for part in value.split(",")]
        try:
            return msgspec.convert(value, self.hint, strict=not text)
        except msgspec.ValidationError as error:
            wanted = f"expected one of {', '.join(self.choices)}" if self.choices else _first_lower(str(error))
            raise ConfigError(f"{self.name} = {one_line(value)} (from {origin}): {wanted}") from None


def fields_of(struct: type[msgspec.Struct]) -> Iterator[Field]:
    """The fields of a settings struct, in their order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    for info in msgspec.structs.fields(struct):
        yield Field(name=info.name, hint=hints[info.name], help=_description(hints[info.name]), default=info.default)


def one_line(value: Any) -> str:
    """A value as it stands in messages and listings: on one line, and not longer than can be read."""
    if isinstance(value, list | tuple):
        return ", ".join(one_line(item) for item in value)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if not text.isprintable() or text != text.strip() or not text:
        text = repr(text)
    return text if len(text) <= 200 else text[:197] + "..."


def _plain(hint: Any) -> Any:
    """The type without annotations and without None; a choice between several types stays one."""
    while typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
        return _plain(parts[0]) if len(parts) == 1 else hint
    return hint


def _description(hint: Any) -> str:
    """The description in the annotations. TypeError where there is none: a setting without help is a bug."""
    if typing.get_origin(hint) is Annotated:
        for meta in typing.get_args(hint)[1:]:
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    raise TypeError(f"no description in {hint}")


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]
