"""Where a model comes from: a folder, a .gguf file, a model hub, or the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chairlift_worker.model.demo import DEMO_NAME, demo_gguf
from chairlift_worker.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's name and the one place it is in."""

    asked: str  # as in the setting, for messages
    name: str  # as users see it
    folder: Path | None = None
    gguf: Path | None = None
    hub_id: str | None = None


def find_source(model: str) -> ModelSource:
    """What the setting `model` means. Raises ModelError where it means nothing."""
    if model == "demo":
        return ModelSource(asked=model, name=DEMO_NAME, gguf=demo_gguf())
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(asked=model, name=path.resolve().name, folder=path.resolve())
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model = {model}: a file must be a .gguf file")
        return ModelSource(asked=model, name=path.stem, gguf=path.resolve())
    if path.suffix == ".gguf" or model.startswith(("/", "./", "../", "~")) or model.count("/") != 1:
        raise ModelError(f"model = {model}: no such folder or file, and not a hub id of the form OWNER/NAME")
    return ModelSource(asked=model, name=model, hub_id=model)
