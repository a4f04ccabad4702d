"""The little of msgspec and structlog that the worker's parts need, for a machine that has neither.

Structs become dataclasses. Nothing is encoded: there are no rings in `make gpu-check`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from typing import Any


class _StructType(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> type:
        made = super().__new__(mcs, name, bases, namespace)
        if not bases:
            return made
        for field in namespace.get("__annotations__", {}):
            default = namespace.get(field)
            if isinstance(default, list | dict):
                setattr(made, field, dataclasses.field(default_factory=default.copy))
        # Not frozen, which would make them ten times as slow to make.
        return dataclasses.dataclass(unsafe_hash=True, kw_only=options.get("kw_only", False))(made)

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_options: Any) -> None:
        super().__init__(name, bases, namespace)


class Struct(metaclass=_StructType):
    """A dataclass."""


class Nothing:
    """Is made of anything, and does nothing."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._do_nothing

    def _do_nothing(self, *_args: object, **_options: object) -> None:
        pass


class Log(Nothing):
    """Tells warnings and errors."""

    def warning(self, event: str, **facts: object) -> None:
        """On standard error."""
        print(event, *(f"{name}={value}" for name, value in facts.items()), file=sys.stderr)

    error = exception = warning


def install() -> tuple[str, ...]:
    """Puts stand-ins where a library is missing; returns the names of those."""
    missing = tuple(name for name in ("msgspec", "structlog") if not _is_there(name))
    if "msgspec" in missing:
        structs = _module("msgspec.structs", replace=dataclasses.replace, fields=dataclasses.fields)
        msgpack = _module("msgspec.msgpack", Encoder=Nothing, Decoder=Nothing)
        json = _module("msgspec.json", Encoder=Nothing, Decoder=Nothing)
        names = {"Struct": Struct, "Meta": Nothing, "structs": structs, "msgpack": msgpack, "json": json}
        _module("msgspec", **names, DecodeError=ValueError, ValidationError=ValueError, UNSET=None)
    if "structlog" in missing:
        _module("structlog", get_logger=Log)
    return missing


def _is_there(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def _module(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module
