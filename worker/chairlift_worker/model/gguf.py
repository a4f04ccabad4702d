"""A .gguf file as a folder: unpacked once into the cache, since reading one takes half a minute, a folder a second."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from chairlift_worker.model.cache_folder import cache_folder, made_once
from chairlift_worker.model.checks import check_loading


def unpacked(gguf: Path, dtype: torch.dtype) -> Path:
    """A folder with the file's weights in `dtype`, its config and its tokenizer; kept for the next start.

    The copy belongs to this file (name, size, time of change), this type, and this version of transformers.
    """
    stat = gguf.stat()
    kind = str(dtype).removeprefix("torch.")
    key = f"{gguf.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{kind}-transformers-{transformers.__version__}"

    def fill(folder: Path) -> None:
        # Through a folder of its own: what lies beside the file, configs and code, is not read.
        source = folder / "source"
        source.mkdir()
        (source / gguf.name).symlink_to(gguf)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                gguf_file=gguf.name,
                trust_remote_code=False,
                # Without this transformers keeps the weights packed and unpacks them at every use.
                quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
                dtype=dtype,
                output_loading_info=True,
            )
        model, info = loaded
        check_loading(str(gguf), info)
        model.save_pretrained(folder)
        # A .gguf file has no generation config; this one would only repeat what transformers made up.
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
        shutil.rmtree(source)

    return made_once(cache_folder() / "gguf" / key, fill)
