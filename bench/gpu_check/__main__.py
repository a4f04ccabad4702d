"""`make gpu-check`: what a GPU alone can show, in under eight minutes, with nothing fetched.

Needs Python 3.12, torch, triton and transformers, and the worker's package (`make gpu-wheel`). Writes a table to
standard output and gpu_check.json into $OUT, or bench/out. Ends with 1 where something failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from functools import partial
from pathlib import Path

import bare

MISSING = bare.install()

import torch  # noqa: E402 - after the stand-ins
import transformers  # noqa: E402
from checks import check_async, check_backends, check_graphs, check_sampling, check_swap, runnable  # noqa: E402
from report import Report  # noqa: E402
from speed import check_speed  # noqa: E402


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="what a GPU alone can show")
    parser.add_argument("--dry", action="store_true", help="the same on the CPU, at toy size")
    options = parser.parse_args()
    dry: bool = options.dry
    if not dry and not torch.cuda.is_available():
        print("torch sees no GPU; --dry does without", file=sys.stderr)
        return 2
    device = torch.device("cpu" if dry else "cuda")
    transformers.logging.set_verbosity_error()
    report = Report(_facts(device, dry=dry))
    parts = {
        "sampling": (partial(check_sampling, device=device, dry=dry), 30),
        "backends": (partial(check_backends, device=device, dry=dry), 75),
        "graphs": (partial(check_graphs, device=device, dry=dry), 30),
        "async": (partial(check_async, device=device, dry=dry), 30),
        "swap": (partial(check_swap, device=device), 20),
        "speed, 0.6B": (partial(check_speed, device=device, name="0.6B", dry=dry), 125),
        "speed, 4B": (partial(check_speed, device=device, name="4B", dry=dry), 150),
    }
    for name, (check, seconds) in parts.items():
        report.run(name, check, seconds=seconds * (10 if dry else 1))  # other programs may take a CPU's time
    report.write(Path(os.environ.get("OUT") or "bench/out") / "gpu_check.json")
    print(f"\n{report.table()}")
    return 0 if report.ok else 1


def _facts(device: torch.device, *, dry: bool) -> dict[str, object]:
    return {
        "dry": dry,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "stand_ins": list(MISSING),
        "backends": runnable(device, torch.float32 if dry else torch.bfloat16),
    }


if __name__ == "__main__":
    sys.exit(main())
