"""Loading a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model.checks import check_config, check_loading, check_split, check_windows, text_config
from chairlift_worker.model.dtype import choose_dtype
from chairlift_worker.model.errors import ModelError, told_in_one_line
from chairlift_worker.model.files import INDEX, check_folder, check_named, indexed_names
from chairlift_worker.model.gguf import unpacked
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.model.overrides import Overridden, override
from chairlift_worker.model.probe import probe
from chairlift_worker.model.source import find_source
from chairlift_worker.model.tokenizer import eos_of_tokenizer, tokenizer_folder

_GENERATION_CONFIG = "generation_config.json"


def load_model(settings: WorkerSettings, *, first_alone: AbstractContextManager[None] | None = None) -> LoadedModel:
    """The model that the settings name. Raises ModelError, in one line, if it cannot be loaded or served.

    Hub ids go through transformers' own loading, which honours HF_HUB_OFFLINE, HF_HOME and the like. With several ranks
    this process gets its part of it; inside `first_alone` it may fetch or unpack the files.
    """
    asked = settings.model
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with told_in_one_line(asked):
        source = find_source(asked)
        dtype, dtype_reason = choose_dtype(settings.dtype)
        with first_alone or nullcontext():
            location = str(unpacked(source.gguf, dtype) if source.gguf else source.folder or source.hub_id)
            overridden = _config(location, settings)
        config = overridden.config
        check_config(asked, config)
        check_split(asked, config, settings.tp_size)
        _check_files(location, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=None,  # not what the config says: that may be the name of code in a hub
            ignore_mismatched_sizes=True,  # reported, and refused below with the tensors' names
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
            distributed_config=DistributedConfig(tp_size=settings.tp_size) if settings.tp_size > 1 else None,
        )
        module, info = loaded
        check_loading(asked, info)
        module.eval().requires_grad_(requires_grad=False)
        shape = probe(asked, module)
        check_windows(asked, config, shape.layers)
        revision = getattr(config, "_commit_hash", None)
        folder = tokenizer_folder(asked, location, revision=revision, trust_remote_code=settings.trust_remote_code)
        generation = _generation_config(location)
        eos = [text_config(config).eos_token_id, config.eos_token_id, generation.get("eos_token_id")]
        return LoadedModel(
            module=module,
            name=source.name,
            architecture=type(module).__name__,
            tokenizer_dir=folder,
            vocab_size=shape.vocab_size,
            context_len=_context_len(asked, config, settings.max_context),
            eos_token_ids=_ids([*eos, eos_of_tokenizer(folder)]),
            dtype=dtype,
            dtype_reason=dtype_reason,
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            generation_config=generation,
            layers=shape.layers,
            attention_options=shape.options,
            overridden=overridden.names,
        )


def _config(location: str, settings: WorkerSettings) -> Overridden:
    config = AutoConfig.from_pretrained(location, trust_remote_code=settings.trust_remote_code)
    if not settings.model_config:
        return Overridden(config, ())
    stored, _ = PreTrainedConfig.get_config_dict(location)
    return override(config, stored, settings.model_config)


def _check_files(location: str, config: PreTrainedConfig) -> None:
    """Raises ValueError where loading would read what it must not."""
    check_named(config)
    if Path(location).is_dir():
        check_folder(Path(location))
    elif index := cached_file(location, INDEX, _raise_exceptions_for_missing_entries=False):
        indexed_names(Path(index))


def _generation_config(location: str) -> dict[str, object]:
    """generation_config.json as it is, without the defaults that transformers would add."""
    folder = Path(location)
    file = (
        folder / _GENERATION_CONFIG
        if folder.is_dir()
        else cached_file(location, _GENERATION_CONFIG, _raise_exceptions_for_missing_entries=False)
    )
    if file is None or not Path(file).is_file():
        return {}
    content = json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelError(f"{_GENERATION_CONFIG} is not a JSON object")
    return content


def _context_len(asked: str, config: PreTrainedConfig, max_context: int | None) -> int:
    """The model's context, lowered by the setting."""
    known: int | None = getattr(text_config(config), "max_position_embeddings", None)
    bounds = [bound for bound in (known, max_context) if bound is not None]
    if not bounds:
        raise ModelError(f"model = {asked}: its config names no context length; set max_context")
    return min(bounds)


def _ids(values: Iterable[object]) -> tuple[int, ...]:
    """Ids out of None, single ids and lists of ids; sorted, each once."""
    found: set[int] = set()
    for value in values:
        entries = value if isinstance(value, list | tuple) else [value]
        found.update(entry for entry in entries if isinstance(entry, int))
    return tuple(sorted(found))
