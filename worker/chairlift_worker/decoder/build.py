"""From a loaded model to the native decoder's forward pass."""

from __future__ import annotations

from typing import Final

import torch
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.base import AttentionOptions
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.native_kernel import Isa
from chairlift_worker.decoder.choice import Quantization
from chairlift_worker.decoder.forward import DecoderForward
from chairlift_worker.decoder.model import DecoderModel, Formats
from chairlift_worker.decoder.packing import Format
from chairlift_worker.decoder.recipe import make_recipe
from chairlift_worker.decoder.rope import RopeTable
from chairlift_worker.model.loaded import LoadedModel

_PLAIN: Final = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


def formats_of(dtype: torch.dtype, quantization: Quantization) -> Formats:
    """What weights of a type are packed as. The output layer, whose rows are the embedding too, stays at 8 bits."""
    match quantization:
        case "none":
            return Formats(layers=_PLAIN[dtype], head=_PLAIN[dtype])
        case "int8":
            return Formats(layers=Format.INT8, head=Format.INT8)
        case "int4":
            return Formats(layers=Format.INT4, head=Format.INT8)


def build_forward(model: LoadedModel, *, cache: PagedCache, quantization: Quantization, isa: Isa) -> DecoderForward:
    """The pass of a model without fault (recipe.recipe_fault). Raises ValueError for weights that cannot be packed."""
    recipe = make_recipe(model.module, model.attention_options)
    packed = DecoderModel(recipe=recipe, formats=formats_of(model.dtype, quantization), cache=cache, isa=isa)
    ropes = [RopeTable(rotary=recipe.rotary, layer_type=kind, context_len=model.context_len) for kind in recipe.ropes]
    return DecoderForward(model=packed, ropes=ropes)


class DecoderWeights:
    """Puts another module's weights into the native decoder's packed ones."""

    def __init__(self, *, forward: DecoderForward, options: tuple[AttentionOptions, ...]) -> None:
        self._forward = forward
        self._options = options

    def take(self, source: PreTrainedModel) -> None:
        """Packs the source's weights in place of the present ones. No forward pass may run meanwhile.

        Raises ValueError, with the present ones untouched, for weights that cannot be packed.
        """
        self._forward.model.replace(make_recipe(source, self._options))


def release(module: PreTrainedModel) -> None:
    """Lets go of the module's parameters, which are packed elsewhere by now: their names, shapes and ties remain."""
    hollow: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():  # noqa: SLF001 - the way that keeps ties
            if parameter is not None:
                empty = hollow.setdefault(
                    id(parameter), torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
                )
                part._parameters[name] = empty  # noqa: SLF001
