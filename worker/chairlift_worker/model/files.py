"""Which files of a model are read: its folder's own, and of weights safetensors alone.

transformers takes what an index names, wherever that lies, and unpickles what is not called `.safetensors`. So names
are looked at before it is let in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedConfig

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_SUFFIX: Final = ".safetensors"
_ADAPTER: Final = "adapter_config.json"
_FURTHER_FOLDERS: Final = ("additional_chat_templates",)  # read besides the files in the folder itself


def check_folder(folder: Path) -> None:
    """Raises ValueError, one line, for a folder from which something else than its own safetensors would be read."""
    if (folder / _ADAPTER).exists():
        raise ValueError(f"{_ADAPTER}: adapters are not supported")
    for file in weight_files(folder):
        if not file.is_file():
            raise ValueError(f"{INDEX} names {file.name}, which is not there")
    for file in _entries(folder):
        if not _is_inside(folder, file):
            raise ValueError(f"{file.relative_to(folder)} is a link that leads out of the folder")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the tensors, those of the index if not one has all. Raises ValueError as `check_folder`."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise ValueError(f"has neither {SINGLE} nor {INDEX}")
    return [folder / name for name in indexed_names(folder / INDEX)]


def indexed_names(index: Path) -> list[str]:
    """The files that an index names. Raises ValueError where one is no safetensors file beside the index."""
    content: Any = json.loads(index.read_text(encoding="utf-8"))
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{INDEX} has no weight_map")
    for name in names.values():
        _check_name(name, named_by=INDEX)
    return sorted(set(names.values()))


def check_named(config: PreTrainedConfig) -> None:
    """Raises ValueError where the config itself names a file of weights that is no safetensors file beside it."""
    name = getattr(config, "transformers_weights", None)
    if name is not None:
        _check_name(name, named_by="config.json")


def _check_name(name: object, *, named_by: str) -> None:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(_SUFFIX):
        raise ValueError(f"{named_by} names {name!r} as weights, which is no {_SUFFIX} file of the folder")


def _entries(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir())
    for name in _FURTHER_FOLDERS:
        if (folder / name).is_dir():
            yield from sorted((folder / name).iterdir())


def _is_inside(folder: Path, file: Path) -> bool:
    """Whether a file is the folder's own. Hugging Face's cache keeps the files of its snapshots in a folder beside."""
    home, place = folder.resolve(), file.resolve()
    in_cache = home.parent.name == "snapshots" and place.parent == home.parent.parent / "blobs"
    return place.is_relative_to(home) or in_cache
