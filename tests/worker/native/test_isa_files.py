"""What is compiled for one instruction set, as the build left it."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUFFIXES = ("_avx2", "_avx512", "_avx512bf16", "_amx")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_a_file_for_an_instruction_set_offers_a_table_and_no_code() -> None:
    """Whoever calls a function of it to ask would run its instructions on processors that lack them.

    The same goes for instances of templates that the linker merges with those of other files.
    """
    objects = [
        path
        for path in ROOT.glob("build/*/CMakeFiles/chairlift_native.dir/src/*.o")
        if path.name.removesuffix(".cpp.o").endswith(SUFFIXES)
    ]
    assert len(objects) >= 7, "an editable install keeps them"
    for path in objects:
        listed = subprocess.run(
            ["nm", "--defined-only", "--extern-only", path], capture_output=True, text=True, check=True
        )
        kinds = {line.split()[1] for line in listed.stdout.splitlines()}
        assert kinds & {"R", "D"}, path
        assert not kinds & {"T", "W", "u", "i"}, f"{path.name}:\n{listed.stdout}"
