"""A key-value cache whose rows come and go: left-padded, so that all rows end at the same column."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """Tokens are written into room that lies ahead, instead of copying everything for each new one."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
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
        """Keys and values are what was written so far."""
        self.room, self.length = room, length
        self.keys, self.values = (part[..., :length, :] for part in room)
        return self.keys, self.values

    def keep(self, rows: Tensor, drop_left: int) -> None:
        left = self.length - drop_left
        kept = tuple(with_room(room, len(rows), left) for room in self.room)
        for old, new in zip(self.room, kept, strict=True):
            torch.index_select(old[:, :, drop_left : self.length], 0, rows, out=new[..., :left, :])
        self._show(kept, left)

    def join(self, other: GrowingLayer) -> None:
        longest, mine = max(self.length, other.length), len(self.room[0])
        rooms = tuple(with_room(room, mine + len(other.room[0]), longest) for room in self.room)
        for upper, lower, new in zip(self.room, other.room, rooms, strict=True):
            _write(new[:mine], upper, self.length, longest)
            _write(new[mine:], lower, other.length, longest)
        self._show(rooms, longest)


def with_room(like: Tensor, rows: int, tokens: int) -> Tensor:
    """Unwritten memory for these tokens and half as many more."""
    return like.new_empty(rows, like.shape[1], tokens + tokens // 2 + 32, like.shape[-1])


def _write(room: Tensor, tokens: Tensor, length: int, end: int) -> None:
    """Tokens up to column `end`. What is left of them is padding: of weight zero, but it must be finite."""
    room[..., : end - length, :] = 0
    room[..., end - length : end, :] = tokens[..., :length, :]


class RowCache(Cache):
    """The cache of the running rows."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def keep_rows(self, keep: Tensor, drop_left: int) -> None:
        """Only these rows, without the columns at the left that are padding in all of them."""
        for layer in self.layers:
            assert isinstance(layer, GrowingLayer), "only plain attention layers can be cached by rows"
            layer.keep(keep, drop_left)

    def add_rows(self, other: RowCache) -> None:
        """The rows of another cache below ours, both padded at the left to the longer one."""
        for mine, yours in zip(self.layers, other.layers, strict=True):
            assert isinstance(mine, GrowingLayer)
            assert isinstance(yours, GrowingLayer)
            mine.join(yours)
