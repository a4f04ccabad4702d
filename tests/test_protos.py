"""The API stays compatible with the last released one: `buf breaking`, as `make lint` runs it, finds what is not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMAND = re.search(r"^\tcd protos && \.\./\$\(BIN\)/buf (breaking .+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "protos", tmp_path / "protos"))


def breaking(protos: Path) -> subprocess.CompletedProcess[str]:
    assert COMMAND is not None, "make lint runs no `buf breaking`"
    program = Path(sys.executable).with_name("buf")
    return subprocess.run([program, *COMMAND[1].split()], cwd=protos, text=True, capture_output=True, check=False)


def change(protos: Path, old: str, new: str) -> None:
    path = protos / "chairlift/v1/request.proto"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_the_api_breaks_nothing_that_was_released(protos: Path) -> None:
    done = breaking(protos)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("  string session = 2;\n", "", 'field "2" with name "session" on message "GenerationRequest" was deleted'),
        ("optional uint64 seed = 6;", "optional string seed = 6;", 'Field "6" with name "seed"'),
        ("bool ignore_eos = 2;", "bool ignore_eos = 33;", 'field "2" with name "ignore_eos"'),
        ("bool ignore_eos = 2;", "bool ignore_all_eos = 2;", 'Field "2" with name "ignore_all_eos"'),
    ],
)
def test_what_would_break_callers_is_found(protos: Path, old: str, new: str, told: str) -> None:
    change(protos, old, new)
    done = breaking(protos)
    assert done.returncode != 0
    assert told in done.stdout


def test_a_new_field_breaks_nothing(protos: Path) -> None:
    change(protos, "  string session = 2;\n", "  string session = 2;\n  // New.\n  string label = 100;\n")
    assert breaking(protos).returncode == 0
