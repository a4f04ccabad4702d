"""The weights of the model that runs, and putting others in their place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.model.errors import WeightsError
from chairlift_worker.model.files import check_folder, weight_files

_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_NAMED: Final = 8

# Entries of a config that say nothing about what the weights mean.
_MEANINGLESS: Final = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "use_cache"),
        "tie_word_embeddings",  # the tensors themselves are compared
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "resid_pdrop"),
        *("embd_pdrop", "attn_pdrop", "hidden_dropout", "output_attentions", "output_hidden_states", "return_dict"),
        *(
            "id2label",
            "label2id",
            "problem_type",
            "chunk_size_feed_forward",
            "is_encoder_decoder",
            "task_specific_params",
        ),
    }
)

_log = structlog.get_logger(__name__)


class LiveWeights:
    """Replaces a running module's weights in place: every tensor keeps its address, its type and its ties.

    Where the module's weights were packed into another form and are no longer its own, `take` puts a second module's
    weights into that form instead, in the same thread; it raises ValueError, having changed nothing, where that form
    cannot hold them. `overridden` are entries of the config that a setting changed, which a folder's config need not
    share.
    """

    def __init__(
        self,
        *,
        module: PreTrainedModel,
        take: Callable[[PreTrainedModel], None] | None = None,
        overridden: Collection[str] = (),
    ) -> None:
        self._module = module
        self._take = take
        self._overridden = frozenset(overridden)

    def update(self, folder: str) -> int:
        """Takes the weights of a folder of safetensors; returns the number of tensors replaced. No step may run.

        Raises WeightsError, with the module untouched, as `read` and `put` do.
        """
        return self.put(folder, self.read(folder))

    def read(self, folder: str) -> PreTrainedModel:
        """A second module with the weights of a folder, compared with the running one.

        Raises WeightsError where the files cannot be read, lack a tensor, have one too many, or one of another shape,
        where tensors differ that the module ties together, or where the folder's config.json is that of another
        architecture.
        """
        place = Path(folder)
        try:
            self._check_folder(place)
            new, info = self._read(place)
        except WeightsError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise _invalid(folder, lines[0].strip()) from error
        _check_names(folder, info)
        _check_ties(folder, self._module, _tensors(new))
        return new

    def put(self, folder: str, new: PreTrainedModel) -> int:
        """Puts the weights that `read` brought in place; returns the number of tensors replaced. No step may run.

        Raises WeightsError, with the module untouched, where their packed form cannot hold them.
        """
        if self._take is None:
            _copy(_tensors(new), self._module)
        else:
            try:
                self._take(new)
            except ValueError as error:
                raise _invalid(folder, str(error)) from error
        num_tensors = len({id(tensor) for tensor in _tensors(self._module).values()})
        _log.info("weights updated", folder=folder, tensors=num_tensors)
        return num_tensors

    def _check_folder(self, folder: Path) -> None:
        """What can be told without loading."""
        if not folder.is_absolute() or not folder.is_dir():
            raise _invalid(folder, "must be the absolute path of a folder")
        check_folder(folder)
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as tensors:
                strange = [name for name in tensors.keys() if tensors.get_slice(name).get_dtype() not in _FLOATS]  # noqa: SIM118 - no mapping
            if strange:
                raise _invalid(folder, f"tensors that are not floating-point numbers: {_some(strange)}")
        if (folder / "config.json").is_file():
            self._check_config(folder)

    def _check_config(self, folder: Path) -> None:
        live = self._module.config
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind != live.model_type:
            raise _invalid(folder, f"its config.json is of a {kind} model, not {live.model_type}")
        theirs = _meaning(type(live).from_pretrained(folder, local_files_only=True))
        ours = _meaning(live)
        different = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        if different := different - self._overridden:
            raise _invalid(folder, f"its config.json differs from that of the running model: {_some(different)}")

    def _read(self, folder: Path) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """A second module, on the CPU, that transformers loads as it loaded the first, names converted and all."""
        loaded: Any = type(self._module).from_pretrained(
            folder,
            config=copy.deepcopy(self._module.config),
            dtype=self._module.dtype,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported, and refused with the tensors' names
            output_loading_info=True,
        )
        module, info = loaded
        return module, info


def _meaning(config: PreTrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in _MEANINGLESS}


def _check_names(folder: str, info: Mapping[str, Any]) -> None:
    """Raises WeightsError unless the files hold the module's tensors, in their shapes, and no others."""
    mismatched = [str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"]]
    for names, fault in (
        (info["missing_keys"], "tensors missing in its files"),
        (info["unexpected_keys"], "tensors that the model does not have"),
        (mismatched, "tensors of another shape than the running model's"),
    ):
        if names:
            raise _invalid(folder, f"{fault}: {_some(names)}")
    if info.get("error_msgs"):
        raise _invalid(folder, str(info["error_msgs"][0]).splitlines()[0])


def _check_ties(folder: str, module: PreTrainedModel, source: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightsError where names that stand for one tensor in the module have different values in the source."""
    first_of: dict[int, str] = {}
    for name, tensor in _tensors(module).items():
        first = first_of.setdefault(id(tensor), name)
        if source[first] is not source[name] and not torch.equal(source[first], source[name]):
            raise _invalid(folder, f"{name} differs from {first}, with which the running model shares it")


def _tensors(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Everything that a file of weights says of the module, by name; tied ones under each of their names."""
    saved = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], module: PreTrainedModel) -> None:
    """Writes the source's values into the module's tensors, tied ones once; of split ones this rank's part."""
    written: set[int] = set()
    for name, tensor in _tensors(module).items():
        if id(tensor) not in written:
            written.add(id(tensor))
            if isinstance(tensor, DTensor):
                part = distribute_tensor(source[name], tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(source[name])


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(ordered[:_MAX_NAMED]) + more


def _invalid(folder: Path | str, fault: str) -> WeightsError:
    return WeightsError(f"INVALID_WEIGHTS: {folder}: {fault}")
