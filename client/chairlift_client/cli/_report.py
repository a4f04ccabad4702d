"""What `chairlift bench` measures and reports."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift_client.cli._output import WrongUseError


@dataclass(slots=True)
class Measured:
    """One request: when it was sent, when each delta came and with how many tokens, in seconds of one clock."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.arrivals)

    def gaps(self) -> list[float]:
        """Seconds between each token and the one before it. Tokens that came together have no gap between them."""
        gaps: list[float] = []
        before = None
        for when, count in self.arrivals:
            if before is not None:
                gaps.append(when - before)
            gaps.extend([0.0] * (count - 1))
            before = when
        return gaps


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between closest ranks, as numpy's default; of one value, that value."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, p50 and p99 in milliseconds; zeros where nothing was measured."""
    if not seconds:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    milliseconds = [1000 * value for value in seconds]
    return {
        "mean": statistics.fmean(milliseconds),
        "p50": percentile(milliseconds, 50),
        "p99": percentile(milliseconds, 99),
    }


def distributions(measured: Sequence[Measured]) -> dict[str, list[float]]:
    """Seconds by name: to the first token, between tokens, to the end. Of requests that ended well."""
    good = [m for m in measured if m.error is None]
    return {
        "ttft_ms": [m.arrivals[0][0] - m.sent for m in good if m.arrivals],
        "itl_ms": [gap for m in good for gap in m.gaps()],
        "e2e_ms": [m.ended - m.sent for m in good],
    }


def report(measured: Sequence[Measured], seconds: float) -> dict[str, Any]:
    """The figures. `seconds` run from the first request sent to the last ending."""
    good = [m for m in measured if m.error is None]
    output_tokens = sum(m.num_tokens for m in good)
    return {
        "requests": len(good),
        "failed": len(measured) - len(good),
        "output_tokens": output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "requests_per_s": len(good) / seconds,
        **{name: summary(values) for name, values in distributions(measured).items()},
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for reading."""
    counts = f"{figures['requests']} requests, {figures['failed']} failed, {figures['output_tokens']} output tokens"
    rates = f"{figures['output_tokens_per_s']:.1f} tokens/s, {figures['requests_per_s']:.2f} requests/s"
    lines = [f"{counts} in {figures['seconds']:.2f} s: {rates}", f"{'ms':>6}{'mean':>10}{'p50':>10}{'p99':>10}"]
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        row = figures[name]
        lines.append(f"{name.removesuffix('_ms'):>6}{row['mean']:10.2f}{row['p50']:10.2f}{row['p99']:10.2f}")
    return "\n".join(lines)


def check_plotting() -> None:
    """Raise WrongUseError if `--plot` cannot work here, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise WrongUseError("--plot needs matplotlib: pip install matplotlib")


def plot(measured: Sequence[Measured], path: str) -> None:
    """Draw the three distributions into an image file."""
    # Not an import statement: the plain install does without it.
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.5))
    for axis, (name, seconds) in zip(axes, distributions(measured).items(), strict=True):
        axis.hist([1000 * value for value in seconds], bins=50)
        axis.set_title(name.removesuffix("_ms"))
        axis.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
