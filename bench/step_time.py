"""Where a step's time goes, in the worker, without service or gRPC.

usage: step_time.py [--model demo] [--rows 1 8 32] [--context 250] [--steps 30] [--dtype auto]
                    [--kv-cache-dtype auto|int8] [--json FILE]

For each number of rows: that many requests with `context` prompt tokens decode together; the prefill line is one
prompt of `context` tokens. Medians over steps, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from chairlift_worker.ipc.settings import WorkerSettings
from driver import PARTS, Driver


def measure(driver: Driver, *, rows: int, context: int, steps: int) -> list[dict[str, float | str]]:
    """A line for the prompts and a line for the decoding of so many rows."""
    driver.fill(rows=rows, context=context, steps=steps)
    lines: dict[str, list[dict[str, float]]] = {"prefill": [], "decode": []}
    for num_tokens, times in driver.steps():
        lines["decode" if num_tokens == rows else "prefill"].append({**times, "tokens": float(num_tokens)})
    out: list[dict[str, float | str]] = []
    for kind, taken in lines.items():
        if taken:
            medians = {name: round(statistics.median(t[name] for t in taken), 3) for name in (*PARTS, "tokens")}
            out.append({"kind": kind, "rows": rows, "total": round(sum(medians[name] for name in PARTS), 3), **medians})
    return out


def main() -> None:
    """Prints a table; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=250)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    driver = Driver(
        WorkerSettings(
            model=args.model,
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            num_blocks=1200,
            safety_margin=0.0,
        )
    )
    header = ("kind", "rows", "tokens", "total", *PARTS)
    print("  ".join(f"{name:>8}" for name in header))
    lines = []
    for rows in args.rows:
        for line in measure(driver, rows=rows, context=args.context, steps=args.steps):
            lines.append(line)
            print("  ".join(f"{line[name]:>8}" for name in header), flush=True)
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
