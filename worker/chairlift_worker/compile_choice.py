"""How the two ways through the model are compiled by torch.compile, if at all, and why."""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal

import msgspec

from chairlift_worker.attention.choice import FLASH, Chosen

_AUTOTUNED_FROM: Final = 2  # the first level that tries several ways to compute a matrix product
_STATIC_FROM: Final = 3  # the first level with code for each padded shape


class CompileOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What torch.compile is told, by the names of transformers' CompileConfig."""

    backend: str = "inductor"
    # None: what `options` say, else torch's default. transformers' own, reduce-overhead, captures graphs of its own.
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    fullgraph: bool = False
    dynamic: bool | None = None  # True: one code for all sizes; False: one for each; None: torch finds out
    options: dict[str, Any] | None = None

    def __str__(self) -> str:
        """JSON, as a setting would have it."""
        return msgspec.json.encode(self).decode()


def choose_compile(
    asked: str | None, *, level: int, path: Literal["varlen", "decode"], backend: str, has_fast_path: bool
) -> Chosen[CompileOptions | None]:
    """How one path is compiled; None: not at all. What is `asked` for this path wins over the level.

    Raises ValueError for what torch.compile does not know.
    """
    name = f"{path}_compile_config"
    explicit = None if asked is None else parse_options(asked, name=name)
    if path == "decode" and not has_fast_path:
        warning = None if asked is None else f"{name} = {asked} is not used: the decode fast path is off"
        return Chosen(None, "the decode fast path is off", warning)
    if explicit is not None:
        return Chosen(explicit, "as set")
    if not level:
        return Chosen(None, "default: not compiled")
    if path == "varlen" and backend in FLASH:
        return Chosen(None, f"not compiled: under {backend} its longest context, which changes, is part of the code")
    return Chosen(of_level(level), f"default_compile_level {level}")


def of_level(level: int) -> CompileOptions:
    """What a level from 1 to 3 means, the same as in transformers."""
    return CompileOptions(
        mode="max-autotune-no-cudagraphs" if level >= _AUTOTUNED_FROM else "default", dynamic=level < _STATIC_FROM
    )


def parse_options(text: str, *, name: str) -> CompileOptions:
    """Options as KEY=VALUE pairs between commas or spaces, or as a JSON object.

    Raises ValueError, in one line that names setting, value and what is wrong, for what torch.compile does not know.
    """
    try:
        given = json.loads(text) if text.lstrip().startswith("{") else _pairs(text)
        options = msgspec.convert(given, CompileOptions)
    except ValueError as error:  # msgspec's and json's as well
        raise ValueError(f"{name} = {text}: {error}") from None
    if options.mode is not None and options.options is not None:
        raise ValueError(f"{name} = {text}: torch.compile takes mode or options, not both")
    if (options.options or {}).get("freezing"):
        raise ValueError(f"{name} = {text}: frozen code keeps its weights, so that they could not be updated")
    return options


def _pairs(text: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for pair in filter(None, re.split(r"[,\s]+", text)):
        key, equals, value = pair.partition("=")
        if not equals or key in given:
            raise ValueError(f"{pair!r} is no KEY=VALUE pair of its own; options with several entries need JSON")
        try:
            given[key] = json.loads(value)
        except ValueError:
            given[key] = value
    return given
