"""Entries of a model's config that settings change; the model's own files stay as they are."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedConfig

from chairlift_worker.model.checks import text_config
from chairlift_worker.model.errors import ModelError

# What makes a model another one, or has a setting of its own.
_FIXED: Final = frozenset({"model_type", "architectures", "auto_map", "dtype", "torch_dtype", "quantization_config"})
_OF_FILES: Final = frozenset({"_name_or_path", "_commit_hash"})


@dataclass(frozen=True, slots=True)
class Overridden:
    """A config with other values in it, and the names of its entries that differ."""

    config: PreTrainedConfig
    names: tuple[str, ...]


def parse_overrides(entries: Sequence[str]) -> dict[str, Any]:
    """Values by key. Raises ModelError for what is not KEY=VALUE, and for a key that comes twice."""
    found: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = (part.strip() for part in entry.partition("="))
        if not key or not equals:
            raise ModelError(f"model_config = {entry}: not of the form KEY=VALUE")
        if key in found:
            raise ModelError(f"model_config = {entry}: {key} is given twice")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def override(config: PreTrainedConfig, stored: Mapping[str, Any], entries: Sequence[str]) -> Overridden:
    """The config made anew of what is stored in its file and the entries, so that what derives from them follows.

    Raises ModelError for a key that the config does not have, and where the config does not take the value.
    """
    wanted = parse_overrides(entries)
    if not wanted:
        return Overridden(config, ())
    place = _text_place(config)
    content = copy.deepcopy(dict(stored))
    for key, value in wanted.items():
        owner, name = _find(config, place, key)
        (content if owner is None else content.setdefault(owner, {}))[name] = value
    made: PreTrainedConfig
    try:
        made = type(config).from_dict(content)
    except Exception as error:
        raise ModelError(f"model_config = {', '.join(entries)}: {' '.join(str(error).split())}") from error
    made._commit_hash = getattr(config, "_commit_hash", None)  # noqa: SLF001 - transformers keeps the revision there
    for key, value in wanted.items():
        owner, name = _find(config, place, key)
        got = getattr(made if owner is None else getattr(made, owner), name)
        if got != value:
            raise ModelError(f"model_config: {key} = {value!r} does not hold: this model's config makes it {got!r}")
    before, after = config.to_dict(), made.to_dict()
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} - _OF_FILES
    return Overridden(made, tuple(sorted(names)))


def _find(config: PreTrainedConfig, place: str | None, key: str) -> tuple[str | None, str]:
    """The entry that holds the config that has the key, None for the config itself, and the key as it calls it."""
    name = config.attribute_map.get(key, key)
    if key in _FIXED:
        raise ModelError(f"model_config: {key} cannot be changed")
    if place is not None:
        text = text_config(config)
        name_there = text.attribute_map.get(key, key)
        if name_there in text.to_dict():
            return place, name_there
    if name in config.to_dict():
        return None, name
    raise ModelError(f"model_config: this model's config has no entry {key}")


def _text_place(config: PreTrainedConfig) -> str | None:
    """The entry that holds the config of the text decoder; None where that is the config itself."""
    text = text_config(config)
    if text is config:
        return None
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
