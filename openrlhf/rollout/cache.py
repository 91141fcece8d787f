"""A key-value cache whose rows come and go: left-padded, so that all rows end at the same column."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """Room is doubled when it runs out, instead of copying everything for each new token."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = key_states.new_empty(0), value_states.new_empty(0)
            self.length = 0
        end = self.length + key_states.shape[-2]
        if self.room[0].numel() == 0 or end > self.room[0].shape[-2]:
            self.room = tuple(
                _grown(old, new, self.length, 2 * end)
                for old, new in zip(self.room, (key_states, value_states), strict=True)
            )
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[..., self.length : end, :] = new
        self.length = end
        self.keys, self.values = (room[..., :end, :] for room in self.room)
        return self.keys, self.values

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far, each [rows, heads, tokens, size]."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Other rows or another length; the next token makes room anew."""
        self.keys, self.values = keys, values
        self.room, self.length = (keys, values), keys.shape[-2]


def _grown(old: Tensor, new: Tensor, length: int, room: int) -> Tensor:
    grown = new.new_empty(*new.shape[:-2], room, new.shape[-1])  # nobody reads past the tokens that were written
    if length:
        grown[..., :length, :] = old[..., :length, :]
    return grown


class RowCache(Cache):
    """The cache of the running rows."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def keep_rows(self, keep: Tensor, drop_left: int) -> None:
        """Only these rows, without the columns at the left that are padding in all of them."""
        for layer in self.layers:
            assert isinstance(layer, GrowingLayer), "only plain attention layers can be cached by rows"
            layer.replace(*(tensor[keep, :, drop_left:] for tensor in layer.tensors))

    def add_rows(self, other: RowCache) -> None:
        """The rows of another cache below ours, both padded at the left to the longer one."""
        for mine, yours in zip(self.layers, other.layers, strict=True):
            assert isinstance(mine, GrowingLayer)
            assert isinstance(yours, GrowingLayer)
            longest = max(mine.length, yours.length)
            joined = [
                torch.cat([_left(here, longest), _left(there, longest)])
                for here, there in zip(mine.tensors, yours.tensors, strict=True)
            ]
            mine.replace(*joined)


def _left(tensor: Tensor, length: int) -> Tensor:
    return pad(tensor, (0, 0, length - tensor.shape[-2], 0))
