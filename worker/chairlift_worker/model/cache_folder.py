"""The user's cache folder, and folders in it that are made once."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_TEMP_PREFIX = ".making-"
_ABANDONED_AFTER_S = 3600.0


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/chairlift, or ~/.cache/chairlift."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chairlift"


def made_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, filled by `fill` if it is not there yet.

    It appears complete or not at all: `fill` works in a temporary folder that is renamed at the end. Of two processes
    at once both do the work and the first to finish wins, without locks. Raises what `fill` raises.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    temp = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=folder.parent))
    try:
        fill(temp)
        temp.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder


def _sweep(parent: Path) -> None:
    """Removes what a killed process left half made."""
    for leftover in parent.glob(f"{_TEMP_PREFIX}*"):
        try:
            abandoned = time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER_S
        except FileNotFoundError:
            continue
        if abandoned:
            shutil.rmtree(leftover, ignore_errors=True)
