"""From a step's plan to logits."""

from chairlift_worker.runner.runner import Runner, StepTimes

__all__ = ["Runner", "StepTimes"]
