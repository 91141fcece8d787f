"""A key-value cache for continuous batching: rows can be removed and added between two decoding steps.

Keys and values are padded on the left, so all rows end at the same column. Convolutional and recurrent states have no
columns; they are selected and concatenated by row. `RowCache` replaces each layer of Transformers' `DynamicCache` with
a class that supports this:

    DynamicLayer, DynamicSlidingWindowLayer    GrowingLayer    keys and values [rows, heads, columns, dim]
    DynamicIndexedLayer                        IndexedLayer    the same, and indexer keys [rows, columns, dim]
    LinearAttentionLayer                       StateLayer      states [rows, ...]
    LinearAttentionAnd...                      HybridLayer     both
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, cache_utils


class GrowingLayer(cache_utils.DynamicLayer):
    """Keys and values in preallocated memory, so that a new token does not copy the whole cache.

    A layer with a sliding window also keeps all tokens; the mask hides the tokens outside the window.
    """

    buffers: tuple[Tensor, ...]  # keys and values [rows, heads, allocated columns, dim]
    length: int  # number of columns in use

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [rows, heads, new tokens, dim]; return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.length = 0
            self.buffers = tuple(allocate(new, len(new), 0) for new in (key_states, value_states))
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.buffers[0].shape[-2]:
            grown = tuple(allocate(buffer, len(buffer), end) for buffer in self.buffers)
            for old, new in zip(self.buffers, grown, strict=True):
                new[..., :start, :] = old[..., :start, :]
            self.buffers = grown
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        return self._use(self.buffers, end)

    def _use(self, buffers: tuple[Tensor, ...], length: int) -> tuple[Tensor, Tensor]:
        """Store the buffers, and expose their first `length` columns as keys and values."""
        self.buffers, self.length = buffers, length
        self.keys, self.values = (buffer[..., :length, :] for buffer in buffers)
        return self.keys, self.values

    def keep(self, rows: Tensor, drop_left: int) -> None:
        """Keep only these rows, and drop their first `drop_left` columns."""
        if not self.is_initialized:
            return
        left = self.length - drop_left
        kept = tuple(allocate(buffer, len(rows), left) for buffer in self.buffers)
        for old, new in zip(self.buffers, kept, strict=True):
            torch.index_select(old[:, :, drop_left : self.length], 0, rows, out=new[..., :left, :])
        self._use(kept, left)

    def join(self, others: Sequence[Self]) -> None:
        """Append the rows of the same layer of other caches, all left-padded to the longest."""
        if not self.is_initialized:
            return
        parts = (self, *others)
        longest, rows = max(part.length for part in parts), sum(len(part.buffers[0]) for part in parts)
        joined = tuple(allocate(buffer, rows, longest) for buffer in self.buffers)
        first = 0
        for part in parts:
            end, padding = first + len(part.buffers[0]), longest - part.length
            for old, new in zip(part.buffers, joined, strict=True):
                # Padding has an attention weight of zero, but it must also be finite, because 0 x inf is NaN.
                new[first:end, :, :padding] = 0
                new[first:end, :, padding:longest] = old[:, :, : part.length]
            first = end
        self._use(joined, longest)


def allocate(like: Tensor, rows: int, tokens: int) -> Tensor:
    """Allocate uninitialised memory [rows, heads, columns, dim] for 1.5 x `tokens` + 32 columns."""
    return like.new_empty(rows, like.shape[1], tokens + tokens // 2 + 32, like.shape[-1])


class IndexedLayer(cache_utils.DynamicIndexedLayer, GrowingLayer):
    """Keys and values, plus the indexer keys [rows, columns, dim] of sparse attention."""

    def keep(self, rows: Tensor, drop_left: int) -> None:
        super().keep(rows, drop_left)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[rows, drop_left:]

    def join(self, others: Sequence[Self]) -> None:
        super().join(others)
        if self.indexer_keys is not None:
            keys = [layer.indexer_keys for layer in (self, *others) if layer.indexer_keys is not None]
            wide = [torch.nn.functional.pad(key, (0, 0, self.length - key.shape[1], 0)) for key in keys]
            self.indexer_keys = torch.cat(wide)


class StateLayer(cache_utils.LinearAttentionLayer):
    """Convolutional and recurrent states [rows, ...], without columns."""

    def keep(self, rows: Tensor, drop_left: int) -> None:
        """Keep only these rows; `drop_left` has no effect."""
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    states[number] = state.index_select(0, rows)

    def join(self, others: Sequence[Self]) -> None:
        """Append the rows of the same layer of other caches."""
        for kind in ("conv_states", "recurrent_states"):
            states = vars(self)[kind]
            for number, state in states.items():
                if state is not None:
                    states[number] = torch.cat([state, *(vars(other)[kind][number] for other in others)])


class HybridLayer(cache_utils.LinearAttentionAndFullAttentionLayer, StateLayer, GrowingLayer):
    """Convolutional and recurrent states together with keys and values."""

    def keep(self, rows: Tensor, drop_left: int) -> None:
        StateLayer.keep(self, rows, drop_left)
        GrowingLayer.keep(self, rows, drop_left)

    def join(self, others: Sequence[Self]) -> None:
        StateLayer.join(self, others)
        GrowingLayer.join(self, others)


# Cache layer of Transformers -> the class that replaces it.
ROW_LAYERS: dict[type, type[GrowingLayer | StateLayer]] = {
    cache_utils.DynamicLayer: GrowingLayer,
    cache_utils.DynamicSlidingWindowLayer: GrowingLayer,
    cache_utils.DynamicIndexedLayer: IndexedLayer,
    cache_utils.LinearAttentionLayer: StateLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer: HybridLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: HybridLayer,
}


class RowCache(cache_utils.Cache):
    """The cache of all running rows."""

    layers: list[GrowingLayer | StateLayer]  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: PretrainedConfig) -> None:
        """Create the layers for a model's config; for an attention-only model, layers are created on demand."""
        layers: list[cache_utils.CacheLayerMixin | cache_utils.LinearAttentionCacheLayerMixin] = []
        for layer in cache_utils.DynamicCache(config=config).layers:
            kind = ROW_LAYERS.get(type(layer))
            if kind is None:
                raise NotImplementedError(f"{type(layer).__name__} does not support adding and removing rows")
            states = {} if kind is GrowingLayer else {"number_of_states": vars(layer).get("number_of_states", 1)}
            layers.append(kind(**states))
        if all(type(layer) is GrowingLayer for layer in layers):
            super().__init__(layer_class_to_replicate=GrowingLayer)
        else:
            super().__init__(layers=layers)

    @property
    def has_columns(self) -> bool:
        """True if any layer has keys and values; only these have columns."""
        return any(isinstance(layer, GrowingLayer) for layer in self.layers)
