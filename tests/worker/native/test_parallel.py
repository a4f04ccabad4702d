"""The native code's parallel regions run in torch's pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_no_second_pool_of_threads_appears_beside_torchs() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "threads.py")],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    shares, before, after = done.stdout.split()
    assert shares == "True"
    assert int(before) >= 3  # torch's pool is there, so equal numbers mean something
    assert after == before


def test_without_torch_the_native_code_says_so() -> None:
    probe = (
        "import ctypes; from chairlift_worker.native import load; library = load(); "
        "print(library.chairlift_parallel_pool(), library.chairlift_attention_has_isa(1))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "1"]
