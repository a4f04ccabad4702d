"""Folders that are made once."""

import os
import threading
import time
from pathlib import Path

import pytest
from chairlift_worker.model.cache_folder import cache_folder, made_once


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache_folder() == Path("/some/cache/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/chairlift")


def test_a_folder_is_filled_once(tmp_path: Path) -> None:
    filled = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        (folder / "a").write_text("content")

    for _ in range(2):
        assert (made_once(tmp_path / "x" / "y", fill) / "a").read_text() == "content"
    assert len(filled) == 1
    assert [entry.name for entry in (tmp_path / "x").iterdir()] == ["y"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made_once(tmp_path / "y", fill)
    assert list(tmp_path.iterdir()) == []


def test_two_starts_at_once_both_get_the_whole_folder(tmp_path: Path) -> None:
    both_inside = threading.Barrier(2, timeout=10)
    seen = []

    def fill(folder: Path) -> None:
        (folder / "a").write_text("content")
        both_inside.wait()

    def start() -> None:
        seen.append((made_once(tmp_path / "y", fill) / "a").read_text())

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert seen == ["content", "content"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["y"]


def test_what_a_killed_start_left_is_swept_away_after_a_while(tmp_path: Path) -> None:
    old, new = tmp_path / ".making-old", tmp_path / ".making-new"
    for folder in (old, new):
        folder.mkdir()
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    made_once(tmp_path / "y", lambda _folder: None)
    assert not old.exists()
    assert new.exists()
