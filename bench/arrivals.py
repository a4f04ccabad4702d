"""Time to the first token while requests arrive at random, at parts of the rate that saturates; beside vLLM's.

usage: arrivals.py WORKLOAD.json --model DIR [--vllm-python PATH] [--repeats 4] [--serve-args "..."]

Chairlift from outside, over gRPC; vLLM in its own process, without transport. Each at 50 % and 90 % of what it does
itself when all requests come at once, and Chairlift at vLLM's rates, too.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from chairlift_client.cli._report import percentile

BIN = Path(sys.executable).parent
FRACTIONS = (0.5, 0.9)
VOCABULARY = 49_000  # ids under it are any model's of the benchmarks


class Service:
    """A running service, loaded by `chairlift bench`."""

    def __init__(self, folder: str, workload: Path, model: str, serve_args: str) -> None:
        self._address, self._admin, self._workload = f"unix:{folder}/s", f"unix:{folder}/a", workload
        command = [BIN / "chairlift-serve", "--model", model, "--listen", self._address, "--admin-listen", self._admin]
        command += ["--log-level", "error", *shlex.split(serve_args)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def load(self, *arguments: str) -> dict[str, Any]:
        """What `chairlift bench` reports."""
        subprocess.run(
            [BIN / "chairlift", "flush-prefix-cache", "--target", self._admin], check=True, capture_output=True
        )
        command = [BIN / "chairlift", "bench", "--target", self._address, "--workload", self._workload, "--ignore-eos"]
        command += ["--temperature", "0", "--json", *arguments]
        found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return found

    def end(self) -> None:
        """Stops it."""
        self._process.terminate()
        self._process.wait(60)


def other(request: dict[str, Any], time: int) -> dict[str, Any]:
    """The request with other ids, so that only what is shared within one go through the workload is found again."""
    ids = [(token + 97 * time) % VOCABULARY for token in request["prompt"]]
    return {**request, "id": f"{request['id']}-{time}", "prompt": ids}


def row(name: str, rate: float, ttft_ms: dict[str, float], gap_ms: dict[str, float] | None = None) -> str:
    """A line of the table."""
    gaps = f" | {gap_ms['p50']:.0f} | {gap_ms['p99']:.0f}" if gap_ms else " | |"
    return f"| {name} | {rate:.2f} | {ttft_ms['p50']:.0f} | {ttft_ms['p99']:.0f}{gaps} |"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm-python", type=Path, help="of an environment with vLLM")
    parser.add_argument("--repeats", type=int, default=4, help="the workload so many times over, for a p99 of worth")
    parser.add_argument("--serve-args", default="--dtype bfloat16")
    args = parser.parse_args()
    rows = json.loads(args.workload.read_text())
    print("| system | requests/s | TTFT p50 ms | p99 | gap p50 ms | p99 |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "w.json"
        workload.write_text(json.dumps([other(each, time) for time in range(args.repeats) for each in rows]))
        vllm_rates = []
        if args.vllm_python:
            script = Path(__file__).with_name("vllm_arrivals.py")
            command = [args.vllm_python, script, args.model, workload, *map(str, FRACTIONS)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            for fraction in FRACTIONS:
                at = found[str(fraction)]
                vllm_rates.append(at["rate"])
                ttft = {f"p{p}": 1000 * percentile(at["times"], p) for p in (50, 99)}
                print(row(f"vLLM, {fraction:.0%} of its own rate", at["rate"], ttft), flush=True)
        service = Service(folder, workload, args.model, args.serve_args)
        try:
            saturated = [service.load("--concurrency", "0")["requests_per_s"] for _ in range(2)][-1]
            named = [(f"Chairlift, {fraction:.0%} of its own rate", fraction * saturated) for fraction in FRACTIONS]
            named += [("Chairlift at that rate of vLLM's", rate) for rate in vllm_rates]
            for name, rate in named:
                figures = service.load("--rate", str(rate), "--seed", "7")
                print(row(name, rate, figures["ttft_ms"], figures["itl_ms"]), flush=True)
        finally:
            service.end()


if __name__ == "__main__":
    main()
