"""The C++ tests, built with sanitizers and run by ctest."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(command: list[str], *, cwd: Path, timeout_s: float) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def without_address_randomisation() -> list[str]:
    """ThreadSanitizer of older compilers cannot place its shadow memory where addresses are very random."""
    prefix = ["setarch", platform.machine(), "-R"]
    usable = shutil.which(prefix[0]) and subprocess.run([*prefix, "true"], check=False, capture_output=True)
    return prefix if usable and usable.returncode == 0 else []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_native_code_holds_under_sanitizers(sanitizers: str, pytestconfig: pytest.Config) -> None:
    build = ROOT / "build" / f"native-{sanitizers.replace(',', '-')}"
    build.mkdir(parents=True, exist_ok=True)
    configure = [
        "cmake",
        *("-S", str(ROOT / "worker" / "native"), "-B", str(build)),
        "-DCHAIRLIFT_NATIVE_TESTS=ON",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DCHAIRLIFT_SANITIZE={sanitizers}",
        "-DCMAKE_CXX_FLAGS=-fno-sanitize-recover=all",
        f"-DCHAIRLIFT_STRESS_RECORDS={pytestconfig.getoption('native_records')}",
    ]
    run(configure, cwd=build, timeout_s=60)
    run(["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1)], cwd=build, timeout_s=300)
    run([*without_address_randomisation(), "ctest", "--output-on-failure"], cwd=build, timeout_s=800)
