"""From a step's plan to logits."""

from chairlift_worker.runner.forward import Forward, ModuleForward
from chairlift_worker.runner.runner import Runner, StepTimes

__all__ = ["Forward", "ModuleForward", "Runner", "StepTimes"]
