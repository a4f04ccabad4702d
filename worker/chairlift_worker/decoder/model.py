"""A model's weights packed for the native decoder, and the structs that describe them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.native import CACHE_TYPES
from chairlift_worker.attention.native_kernel import ElementType, Isa, LayerArguments, layer_struct
from chairlift_worker.decoder.native_decoder import DecoderLayerStruct, DecoderStruct, MatrixStruct, matrix_struct
from chairlift_worker.decoder.packing import Format, Packed, check_values, pack
from chairlift_worker.decoder.recipe import LayerRecipe, Linear, Recipe

_PRODUCTS: Final = ("qkv", "out", "gate_up", "down")
_NORMS: Final = (
    "attention_norm",
    "after_attention_norm",
    "mlp_norm",
    "after_mlp_norm",
    "query_norm",
    "key_norm",
)


@dataclass(frozen=True, slots=True)
class Formats:
    """What weights are packed as."""

    layers: Format
    head: Format  # of the output layer and the embedding


class DecoderModel:
    """Owns the packed weights; `struct` describes them and stays where it is."""

    def __init__(self, *, recipe: Recipe, formats: Formats, cache: PagedCache, isa: Isa) -> None:
        """Packs a copy of the weights. `cache` is the memory of keys and values that the model will write to.

        Raises ValueError where the formats cannot hold the weights, or this machine lacks the instruction set.
        """
        self.vocab_size = recipe.head.weight.shape[0]
        self._formats = formats
        self._weights: dict[str, Packed] = {}
        self._vectors: dict[str, torch.Tensor] = {}
        for name, part in _parts(recipe, formats):
            if isinstance(part, Packed):
                self._weights[name] = part
            else:
                self._vectors[name] = part
        self._layers = (DecoderLayerStruct * len(recipe.layers))(
            *(self._layer(number, layer, cache, isa) for number, layer in enumerate(recipe.layers))
        )
        self.struct = DecoderStruct(
            layers=self._layers,
            embedding=self._matrix("head" if recipe.is_tied else "embedding"),
            head=self._matrix("head"),
            norm=self._address("norm"),
            num_layers=len(recipe.layers),
            hidden=recipe.hidden,
            inner=recipe.inner,
            activation=recipe.activation,
            isa=isa,
            eps=recipe.eps,
            embedding_scale=recipe.embedding_scale,
            softcap=recipe.softcap,
        )

    def replace(self, recipe: Recipe) -> None:
        """Takes other weights of the same shapes; addresses stay. No forward pass may run meanwhile.

        Raises ValueError, with the present weights untouched, where the formats cannot hold them.
        """
        for layer in recipe.layers:
            for role in _PRODUCTS:
                check_values(getattr(layer, role).weight, self._formats.layers)
        for weight in (recipe.head.weight, recipe.embedding):
            check_values(weight, self._formats.head)
        for name, part in _parts(recipe, self._formats):
            if isinstance(part, Packed):
                self._weights[name].data.copy_(part.data)
            else:
                self._vectors[name].copy_(part)

    def _matrix(self, name: str) -> MatrixStruct:
        return matrix_struct(self._weights[name], self._vectors.get(f"{name}.bias"))

    def _address(self, name: str) -> int | None:
        vector = self._vectors.get(name)
        return None if vector is None else vector.data_ptr()

    def _layer(self, number: int, layer: LayerRecipe, cache: PagedCache, isa: Isa) -> DecoderLayerStruct:
        layout = cache.layout
        group = layout.groups[cache.group_of[number]]
        attention = LayerArguments(
            cache=cache.sectors.data_ptr(),
            num_units=cache.sectors.shape[0] * layout.sector_units(group),
            cache_type=CACHE_TYPES[cache.sectors.dtype],
            io_type=ElementType.FLOAT32,
            page_size=layout.page_size,
            heads=layer.num_heads,
            kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            unit_offset=2 * group.layers.index(number),
            scale=layer.options.scaling,
            window=layer.options.sliding_window or 0,
            softcap=layer.options.softcap or 0.0,
            isa=isa,
        )
        return DecoderLayerStruct(
            **{role: self._matrix(f"{number}.{role}") for role in _PRODUCTS},
            **{role: self._address(f"{number}.{role}") for role in _NORMS},
            rope=-1 if layer.rope is None else layer.rope,
            group=cache.group_of[number],
            attention=layer_struct(attention),
        )


def _parts(recipe: Recipe, formats: Formats) -> Iterator[tuple[str, Packed | torch.Tensor]]:
    """Everything that a pass reads, by name; one after the other, so that only one is there twice at a time."""
    for number, layer in enumerate(recipe.layers):
        for role in _PRODUCTS:
            yield from _product(f"{number}.{role}", getattr(layer, role), formats.layers)
        for role in _NORMS:
            vector = getattr(layer, role)
            if vector is not None:
                yield f"{number}.{role}", vector
    yield from _product("head", recipe.head, formats.head)
    if not recipe.is_tied:
        yield from _product("embedding", Linear(recipe.embedding, None), formats.head)
    yield "norm", recipe.norm


def _product(name: str, linear: Linear, packed_format: Format) -> Iterator[tuple[str, Packed | torch.Tensor]]:
    yield name, pack(linear.weight, packed_format)
    if linear.bias is not None:
        yield f"{name}.bias", linear.bias
