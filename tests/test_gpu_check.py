"""`make gpu-check DRY=1`: the whole script on the CPU, as on a machine that has neither msgspec nor structlog."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "bench" / "gpu_check"
BARE = (
    "import runpy, sys; sys.modules.update(msgspec=None, structlog=None); sys.argv[1:] = ['--dry'];"
    f"runpy.run_path({str(FOLDER)!r}, run_name='__main__')"
)
PARTS = ["sampling", "backends", "graphs", "async", "swap", "speed, 0.6B", "speed, 4B"]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check_report", FOLDER / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_checks_all_and_says_so_in_json(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", BARE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert result["ok"]
    assert result["dry"]
    assert result["stand_ins"] == ["msgspec", "structlog"]
    assert {"native", "sdpa", "eager"} <= set(result["backends"])
    assert [part["name"] for part in result["parts"]] == PARTS
    items = {(part["name"], item["name"]): item for part in result["parts"] for item in part["items"]}
    assert all(item["ok"] and not item["error"] for item in items.values())
    assert {("swap", "1 in flight"), ("swap", "2 in flight")} <= items.keys()
    assert items["swap", "2 in flight"]["figures"]["swapped"] > 0
    for size in ("0.6B", "4B"):
        for what in ("chairlift, plain", "chairlift, graphs", "chairlift, graphs, async", "transformers, plain"):
            assert items[f"speed, {size}", f"{size}: {what}"]["figures"]["tokens/s"] > 0
    for name, item in items:
        assert f"| {name} | {item} | " in done.stdout


def test_a_failure_is_noted_and_hurts_no_other(report: ModuleType, tmp_path: Path) -> None:
    whole = report.Report({"dry": True})

    def failing(part) -> None:
        with part.item("bad"):
            raise ValueError("not the same")
        with part.item("good") as figures:
            figures["number"] = 3

    def endless(part) -> None:
        with part.item("slow"):
            while True:
                time.sleep(0.01)

    def broken(part) -> None:
        raise RuntimeError("no such model")

    for check in (failing, endless, broken):
        whole.run(check.__name__, check, seconds=0.2)
    assert not whole.ok
    whole.write(tmp_path / "new" / "result.json")
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    found = [(item["name"], item["ok"], item["error"]) for part in result["parts"] for item in part["items"]]
    assert found == [
        ("bad", False, "ValueError: not the same"),
        ("good", True, ""),
        ("slow", False, "out of time"),
        ("the rest", False, "RuntimeError: no such model"),
    ]
    assert "| failing | bad | FAILED: ValueError: not the same |" in whole.table()
    assert "| failing | good | number 3 |" in whole.table()
