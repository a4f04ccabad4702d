"""The real model, for tests: SmolLM2-135M-Instruct in float32."""

from __future__ import annotations

import functools
from pathlib import Path

from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model import load_model


@functools.cache
def smollm2_folder() -> Path:
    """The folder into which the demo model is unpacked, once on a machine: weights, config, tokenizer."""
    return load_model(WorkerSettings(model="demo", dtype="float32")).tokenizer_dir
