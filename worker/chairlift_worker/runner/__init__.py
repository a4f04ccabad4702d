"""From a step's plan to logits."""

from chairlift_worker.runner.forward import Forward, ModuleForward
from chairlift_worker.runner.padding import Padding
from chairlift_worker.runner.passes import make_module_forward
from chairlift_worker.runner.runner import Runner, StepTimes

__all__ = ["Forward", "ModuleForward", "Padding", "Runner", "StepTimes", "make_module_forward"]
