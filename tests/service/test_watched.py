"""Files that change in every way in which files are replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chairlift_service.watched import FileError, Watched


def watch(path: Path) -> tuple[Watched[str], list[str]]:
    """What stands in the file, and how often it was read."""
    reads: list[str] = []

    def read() -> str:
        try:
            reads.append(path.read_text())
        except OSError as error:
            raise FileError(str(path)) from error
        return reads[-1]

    return Watched([str(path)], read=read), reads


def test_a_file_that_stays_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a")
    watched, reads = watch(tmp_path / "f")
    assert [watched.current() for _ in range(3)] == ["a"] * 3
    assert reads == ["a"]


def test_a_file_of_the_same_size_and_time_that_takes_the_name_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a")
    watched, _ = watch(tmp_path / "f")
    (tmp_path / "g").write_text("b")
    before = (tmp_path / "f").stat()
    os.utime(tmp_path / "g", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "g").replace(tmp_path / "f")
    assert watched.current() == "b"


def test_a_folder_that_is_swapped_by_its_link_is_seen_as_kubernetes_swaps_secrets(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "f").symlink_to("data/f")
    watched, _ = watch(tmp_path / "f")
    assert watched.current() == "one"
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(tmp_path / "data")
    assert watched.current() == "two"


def test_a_file_that_is_gone_holds_as_it_was_until_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a")
    watched, reads = watch(tmp_path / "f")
    (tmp_path / "f").unlink()
    assert [watched.current(), watched.current()] == ["a", "a"]
    (tmp_path / "f").write_text("b")
    assert watched.current() == "b"
    assert reads == ["a", "b"]


def test_a_file_that_is_not_there_at_first_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="none"):
        watch(tmp_path / "none")
