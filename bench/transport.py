"""What service and gRPC cost: a workload through them, beside the same worker stepped in one process.

usage: transport.py WORKLOAD.json [--model demo] [--dtype bfloat16] [--rounds 3]

The load generator runs on the same cores and gets every token as a message of its own. Ratios of medians; the two take
turns. The workload is that of `chairlift bench`: a list of {id, prompt: [ids], max_new_tokens}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chairlift_worker.ipc.settings import WorkerSettings
from driver import Driver

BIN = Path(sys.executable).parent


def in_process(driver: Driver, workload: list[dict[str, Any]]) -> float:
    """Output tokens a second."""
    driver.forget_prefixes()
    begin = time.monotonic()
    for request in workload:
        driver.add(request["prompt"], request["max_new_tokens"])
    for _ in driver.steps():
        pass
    return sum(request["max_new_tokens"] for request in workload) / (time.monotonic() - begin)


def through_grpc(model: str, dtype: str, workload: Path, rounds: int) -> list[float]:
    """Output tokens a second of each round, after one that does not count."""
    with tempfile.TemporaryDirectory() as folder:
        address, admin = f"unix:{folder}/s", f"unix:{folder}/a"
        command = [BIN / "chairlift-serve", "--model", model, "--dtype", dtype, "--listen", address]
        command += ["--admin-listen", admin, "--log-level", "error"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            server.stdout.readline()
            return [_client(address, admin, workload) for _ in range(rounds + 1)][1:]
        finally:
            server.terminate()
            server.wait(60)


def _client(address: str, admin: str, workload: Path) -> float:
    subprocess.run([BIN / "chairlift", "flush-prefix-cache", "--target", admin], check=True, capture_output=True)
    command = [BIN / "chairlift", "bench", "--target", address, "--workload", workload, "--concurrency", "0"]
    command += ["--ignore-eos", "--temperature", "0", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rate: float = json.loads(done.stdout)["output_tokens_per_s"]
    return rate


def main() -> None:
    """Prints both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    workload = json.loads(args.workload.read_text())
    driver = Driver(WorkerSettings(model=args.model, dtype=args.dtype, log_level="error"))
    in_process(driver, workload)
    inside, outside = [], []
    for _ in range(args.rounds):
        inside.append(in_process(driver, workload))
        outside += through_grpc(args.model, args.dtype, args.workload, 1)
    ours, bare = statistics.median(outside), statistics.median(inside)
    print(f"{args.workload.stem}: in process {bare:.0f} tokens/s, through gRPC {ours:.0f}, ratio {ours / bare:.2f}")


if __name__ == "__main__":
    main()
