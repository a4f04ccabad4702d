"""How throughput grows with concurrency, and falls with the length of the context; in the worker, without gRPC.

usage: growth.py [--model demo] [--dtype auto] [--steps 12] [--plot FILE.png] [--json FILE]

Tokens a second of decoding: rows divided by the median time of a step. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from chairlift_worker.ipc.settings import WorkerSettings
from driver import PARTS, Driver

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 128  # of the rows above
CONTEXTS = (128, 512, 2048, 4096, 8000)
ROWS = 8  # with the contexts above


def rate(driver: Driver, *, rows: int, context: int, steps: int) -> dict[str, Any]:
    """Tokens a second once all rows decode."""
    driver.forget_prefixes()
    driver.fill(rows=rows, context=context, steps=steps + rows * context // 512 + 4)
    totals = [sum(times[part] for part in PARTS) for num_tokens, times in driver.steps() if num_tokens == rows]
    step_ms = statistics.median(totals[-steps:])
    return {"rows": rows, "context": context, "step_ms": round(step_ms, 2), "tokens_per_s": round(rows / step_ms * 1e3)}


def draw(lines: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Two curves side by side."""
    import matplotlib as mpl  # noqa: PLC0415 - only a plot needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, (name, points) in zip(axes, lines.items(), strict=True):
        axis.plot([point[name] for point in points], [point["tokens_per_s"] for point in points], marker="o")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(
            {"rows": f"requests at once (context {CONTEXT})", "context": f"context ({ROWS} requests)"}[name]
        )
        axis.set_ylabel("tokens a second")
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Prints the table; draws it and writes it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = WorkerSettings(
        model=args.model, dtype=args.dtype, quantization=args.quantization, safety_margin=0.0, log_level="error"
    )
    driver = Driver(settings)
    rate(driver, rows=8, context=CONTEXT, steps=args.steps)  # warm-up
    lines: dict[str, list[dict[str, Any]]] = {"rows": [], "context": []}
    for name, cases in (
        ("rows", [(rows, CONTEXT) for rows in CONCURRENCY]),
        ("context", [(ROWS, c) for c in CONTEXTS]),
    ):
        for rows, context in cases:
            lines[name].append(rate(driver, rows=rows, context=context, steps=args.steps))
            print(lines[name][-1], flush=True)
    if args.plot:
        draw(lines, args.plot)
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
