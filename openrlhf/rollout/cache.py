"""A key-value cache for continuous batching: rows can be removed and added between two decoding steps.

Keys and values are padded on the left, so all rows end at the same column. Convolutional and recurrent states have no
columns: the state of a row is one slice, which is kept or concatenated as it is. `RowCache` replaces each layer of
Transformers' `DynamicCache` with a class that supports this; `decoding.py` is its user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)


class RowLayer(Protocol):
    """The row operations of one cache layer."""

    def keep(self, rows: Tensor, drop_left: int) -> None:
        """Keep only these rows, without the first `drop_left` columns."""
        ...

    def join(self, others: Sequence[Self]) -> None:
        """Append the rows of the same layer of other caches, all left-padded to the longest."""
        ...


class GrowingLayer(DynamicLayer):
    """Keys and values in preallocated memory, so that a new token does not copy the whole cache.

    A layer with a sliding window keeps all tokens too; the mask hides those outside the window.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [rows, heads, new tokens, dim]; return all that have been written."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.length = 0
            self.room = tuple(with_room(new, len(new), 0) for new in (key_states, value_states))
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.room[0].shape[-2]:
            grown = tuple(with_room(room, len(room), end) for room in self.room)
            for old, new in zip(self.room, grown, strict=True):
                new[..., :start, :] = old[..., :start, :]
            self.room = grown
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[..., start:end, :] = new
        return self._show(self.room, end)

    def _show(self, room: tuple[Tensor, ...], length: int) -> tuple[Tensor, Tensor]:
        """Store the buffers, and expose their first `length` columns as keys and values."""
        self.room, self.length = room, length
        self.keys, self.values = (part[..., :length, :] for part in room)
        return self.keys, self.values

    def keep(self, rows: Tensor, drop_left: int) -> None:
        if not self.is_initialized:
            return
        left = self.length - drop_left
        kept = tuple(with_room(room, len(rows), left) for room in self.room)
        for old, new in zip(self.room, kept, strict=True):
            torch.index_select(old[:, :, drop_left : self.length], 0, rows, out=new[..., :left, :])
        self._show(kept, left)

    def join(self, others: Sequence[GrowingLayer]) -> None:
        if not self.is_initialized:
            return
        parts = (self, *others)
        longest, rows = max(part.length for part in parts), sum(len(part.room[0]) for part in parts)
        rooms = tuple(with_room(room, rows, longest) for room in self.room)
        first = 0
        for part in parts:
            end = first + len(part.room[0])
            for old, new in zip(part.room, rooms, strict=True):
                _write(new[first:end], old, part.length, longest)
            first = end
        self._show(rooms, longest)


def with_room(like: Tensor, rows: int, tokens: int) -> Tensor:
    """Allocate uninitialised memory [rows, heads, columns, dim]: columns for `tokens`, half as many more, and 32."""
    return like.new_empty(rows, like.shape[1], tokens + tokens // 2 + 32, like.shape[-1])


def _write(room: Tensor, tokens: Tensor, length: int, end: int) -> None:
    """Copy `length` tokens so that they end at column `end`, and zero the padding to their left.

    Attention gives padding a weight of zero, but the product is zero only if the padding is finite.
    """
    room[..., : end - length, :] = 0
    room[..., end - length : end, :] = tokens[..., :length, :]


class IndexedLayer(DynamicIndexedLayer, GrowingLayer):
    """Keys and values, plus the indexer keys [rows, columns, dim] by which sparse attention selects them."""

    def keep(self, rows: Tensor, drop_left: int) -> None:
        super().keep(rows, drop_left)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[rows, drop_left:]

    def join(self, others: Sequence[Any]) -> None:
        super().join(others)
        if self.indexer_keys is not None:
            keys: list[Any] = [layer.indexer_keys for layer in (self, *others)]
            wide = [torch.nn.functional.pad(key, (0, 0, self.length - key.shape[1], 0)) for key in keys]
            self.indexer_keys = torch.cat(wide)


class StateLayer(LinearAttentionLayer):
    """Convolutional and recurrent states, one slice per row and no columns."""

    def keep(self, rows: Tensor, drop_left: int) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    states[number] = state.index_select(0, rows)

    def join(self, others: Sequence[StateLayer]) -> None:
        for kind in ("conv_states", "recurrent_states"):
            states = vars(self)[kind]
            for number, state in states.items():
                if state is not None:
                    states[number] = torch.cat([state, *(vars(other)[kind][number] for other in others)])


class HybridLayer(LinearAttentionAndFullAttentionLayer, StateLayer, GrowingLayer):
    """Convolutional and recurrent states together with keys and values."""

    def keep(self, rows: Tensor, drop_left: int) -> None:
        StateLayer.keep(self, rows, drop_left)
        GrowingLayer.keep(self, rows, drop_left)

    def join(self, others: Sequence[Any]) -> None:
        StateLayer.join(self, others)
        GrowingLayer.join(self, others)


# The cache layers of Transformers, and the class here that replaces each.
ROW_LAYERS: dict[type, type[GrowingLayer | StateLayer]] = {
    DynamicLayer: GrowingLayer,
    DynamicSlidingWindowLayer: GrowingLayer,
    DynamicIndexedLayer: IndexedLayer,
    LinearAttentionLayer: StateLayer,
    LinearAttentionAndFullAttentionLayer: HybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: HybridLayer,
}


class RowCache(Cache):
    """The cache of all running rows."""

    def __init__(self, config: PretrainedConfig) -> None:
        """Create the layers that the model's config lists; an attention-only model gets its layers on demand."""
        layers: Any = [row_layer(layer) for layer in DynamicCache(config=config).layers]
        if all(type(layer) is GrowingLayer for layer in layers):
            super().__init__(layer_class_to_replicate=GrowingLayer)
        else:
            super().__init__(layers=layers)

    @property
    def has_columns(self) -> bool:
        """True if any layer has attention: convolutional and recurrent states have no columns."""
        return any(isinstance(layer, GrowingLayer) for layer in self.layers)

    def keep_rows(self, keep: Tensor, drop_left: int) -> None:
        """Keep only these rows, without the `drop_left` columns on the left that are padding in all of them."""
        for layer in self._row_layers():
            layer.keep(keep, drop_left)

    def add_rows(self, *others: RowCache) -> None:
        """Append the rows of other caches, all left-padded to the longest."""
        for mine, *yours in zip(*(cache._row_layers() for cache in (self, *others)), strict=True):
            mine.join(yours)

    def _row_layers(self) -> Sequence[RowLayer]:
        layers: Any = self.layers
        return layers


def row_layer(layer: Any) -> GrowingLayer | StateLayer:
    """Create the layer of a `RowCache` that replaces a layer of Transformers."""
    if type(layer) not in ROW_LAYERS:
        raise NotImplementedError(f"{type(layer).__name__} cannot be kept by rows")
    kind = ROW_LAYERS[type(layer)]
    return kind() if kind is GrowingLayer else kind(number_of_states=vars(layer).get("number_of_states", 1))
