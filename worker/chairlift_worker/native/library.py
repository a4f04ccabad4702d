"""Finding and loading the native library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import chairlift_worker.native

LIBRARY_NAME: Final = "libchairlift_native.so"
ABI_VERSION: Final = 5  # as in worker/native/src/abi.cpp


@functools.cache
def load() -> ctypes.CDLL:
    """The library, its calls made without the GIL: for functions that compute for a while. ImportError without it."""
    return _open(ctypes.CDLL)


@functools.cache
def load_brief() -> ctypes.CDLL:
    """The library, its calls made under the GIL: for functions that take about a microsecond and never wait.

    Such a call is over before another thread could use the GIL, while getting it back from a busy thread can take the
    interpreter's whole switch interval of 5 ms. ImportError without the library.
    """
    return _open(ctypes.PyDLL)


def find(folders: Iterable[str]) -> Path:
    """The library in the first folder that has it. ImportError where none has."""
    tried = list(folders)
    for folder in tried:
        path = Path(folder) / LIBRARY_NAME
        if path.is_file():
            return path
    raise ImportError(f"{LIBRARY_NAME} is in none of {', '.join(tried)}: install the package again (pip install .)")


def _open(loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    # An editable install has two entries in __path__, the source tree and the installed one.
    return open_at(find(chairlift_worker.native.__path__), loader=loader)


def open_at(path: Path, *, loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    """The library at a path. ImportError if it cannot be loaded, or is of another version than this Python code."""
    try:
        library = loader(str(path))
        version = library.chairlift_abi_version()
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise ImportError(f"{path} has ABI version {version}, this code needs {ABI_VERSION}: install the package again")
    return library
