"""Loading the native library: found in every kind of install, refused clearly."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from chairlift_worker.native import library


def test_the_library_is_found_in_whichever_folder_of_the_package_has_it(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / library.LIBRARY_NAME).touch()
    assert library.find([str(tmp_path / "source"), str(installed)]) == installed / library.LIBRARY_NAME


def test_a_missing_library_is_one_clear_import_error(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"libchairlift_native\.so is in none of .*install the package again"):
        library.find([str(tmp_path)])


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = library.find(__import__("chairlift_worker.native").native.__path__)
    monkeypatch.setattr(library, "ABI_VERSION", 9999)
    with pytest.raises(ImportError, match=r"this code needs 9999"):
        library.open_at(path, loader=ctypes.CDLL)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / library.LIBRARY_NAME
    path.write_text("no library")
    with pytest.raises(ImportError, match="cannot be loaded"):
        library.open_at(path, loader=ctypes.CDLL)
