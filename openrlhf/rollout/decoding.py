"""Decoding strategies, which compute the next logits of rows that start and finish at different times.

    strategy.prefill(prompts) -> rows, logits     run the model over prompts
    rows.step(tokens, ended) -> logits            append one token to each row
    rows.keep(places), rows.add(other)            remove rows, add rows

`HFEngine` uses only this interface. This module contains the interface and the fastest strategy, continuous batching;
fallback_decoding.py contains slower strategies for models whose caches do not support it. Logits are those of the
model's own forward, including scaling or caps after the head. decoding_check.py tests which strategy is correct for a
model.

Continuous batching keeps all rows in one cache, padded on the left, so that every row ends at the same column:

    row 0   . . . a b c d            `step` appends a column
    row 1   a b c d e f g            `keep` removes rows, and left columns that are padding in all remaining rows
    row 2   . . . . . a b            `add` pads the shorter of two caches on the left and concatenates them
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from openrlhf.models.router_replay import RoutedLayers
from openrlhf.rollout.cache import RowCache

Tokens: TypeAlias = Sequence[int]
ModelCache: TypeAlias = Any  # a `RowCache` or a class of the model family; None to create one
CACHE_NAMES = ("past_key_values", "cache_params", "state")  # names of the cache argument in different model families


class DecodingRows(Protocol):
    """Running rows with their cache."""

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        """Append a token to each row; return logits [rows, vocabulary], undefined for rows that have ended."""
        ...

    def keep(self, places: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...

    def add(self, other: Self, /) -> None:
        """Append the rows of another `prefill`."""
        ...

    def experts(self, place: int) -> Tensor | None:
        """Return the experts chosen for the tokens of a row, [tokens, layers, k]; None if they are not recorded."""
        ...


class Decoding(Protocol):
    """A decoding strategy; `str` returns a description for messages."""

    @property
    def attention(self) -> str | None:
        """Attention implementation that the strategy needs; None: the model's current one."""
        ...

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[DecodingRows, Tensor]:
        """Run the model on prompts; return their rows, and logits [rows, vocabulary] of the first new tokens."""
        ...


class CachedForward:
    """Wrapper of a model's own forward that passes the arguments it accepts and returns the last token's logits."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.decoder = decoder
        self.known = {*inspect.signature(decoder.forward).parameters}
        self.known |= {*inspect.signature(decoder.base_model.forward).parameters}
        self.cache_name = next((name for name in CACHE_NAMES if name in self.known), None)

    def __call__(self, input_ids: Tensor, cache: ModelCache = None, **arguments: Tensor) -> tuple[Tensor, ModelCache]:
        """Return (logits [rows, vocabulary], the cache including these tokens) for input_ids [rows, tokens]."""
        if self.cache_name is None:
            raise NotImplementedError(f"{type(self.decoder).__name__} has no cache")
        given = arguments | {self.cache_name: cache, "use_cache": True, "logits_to_keep": 1}
        known = {name: value for name, value in given.items() if name in self.known}
        outputs = self.decoder(input_ids=input_ids, **known)
        return outputs.logits[:, -1], vars(outputs).get(self.cache_name)


@dataclass(frozen=True)
class ContinuousBatching:
    """One batch of all rows, with a cache that supports adding and removing rows; the fastest strategy."""

    decoder: PreTrainedModel
    attention: str
    pads_prompts: bool = True  # False: prefill prompts of different lengths separately
    routed: RoutedLayers | None = None  # records the experts that are chosen

    def __str__(self) -> str:
        prompts = "" if self.pads_prompts else ", prompts prefilled by length"
        return f"continuous batching with {self.attention} attention{prompts}"

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[CachedRows, Tensor]:
        """Run the model once on each different prompt, and copy the result for all samples of the prompt."""
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        groups = [[*numbers]] if self.pads_prompts else [list(alike) for _, alike in groupby(numbers, len)]
        device = self.decoder.device
        prefilled: list[CachedRows] = []
        found: list[Tensor] = []  # [rows of a group, vocabulary] each
        for group in groups:
            tokens = [torch.tensor(prompt, dtype=torch.long) for prompt in group]  # [tokens of the prompt] each
            ids = pad_sequence(tokens, batch_first=True, padding_side="left")  # [rows, columns], like the mask
            mask = pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True, padding_side="left")
            rows = CachedRows(CachedForward(self.decoder), RowCache(self.decoder.config), mask.to(device), self.routed)
            found.append(rows.advance(ids.to(device), ended=()))
            prefilled.append(rows)

        rows, *others = prefilled
        if others:
            rows.add(*others)
        logits = torch.cat(found)  # [different prompts, vocabulary]
        if len(numbers) < len(prompts):
            places = [numbers[tuple(prompt)] for prompt in prompts]
            rows.keep(places)
            logits = logits[places]
        return rows, logits


@dataclass
class CachedRows:
    """Rows that `ContinuousBatching` decodes as one batch with one cache."""

    forward: CachedForward
    cache: RowCache
    mask: Tensor  # [rows, columns]: 1 for a token, 0 for the padding on the left
    routed: RoutedLayers | None = None
    chosen: Tensor | None = None  # [rows, columns, layers, k]: experts of each token, if recorded

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        self.mask = pad(self.mask, (0, 1), value=1)  # append a column
        return self.advance(torch.tensor(tokens, device=self.mask.device)[:, None], ended)

    def advance(self, ids: Tensor, ended: Sequence[bool]) -> Tensor:
        """Run the model on new tokens [rows, new tokens], already included in the mask; return the last logits."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]  # [rows, new tokens]
        # Rows that have ended stay until they are removed, and could exceed the last position that the model supports.
        positions[[number for number, is_over in enumerate(ended) if is_over]] = 0
        arguments = {"attention_mask": self.mask, "position_ids": positions}
        if ids.shape[1] == 1 and not self.cache.has_columns:
            del arguments["attention_mask"]  # models without attention expect a mask of the new tokens only
        logits = self.forward(ids, self.cache, **arguments)[0]  # [rows, vocabulary]
        if self.routed is not None and self.routed.is_recording:
            fresh = self.routed.chosen().unflatten(0, ids.shape)  # [rows, new tokens, layers, k]
            self.chosen = fresh if self.chosen is None else torch.cat([self.chosen, fresh], dim=1)
        return logits

    def keep(self, places: Sequence[int]) -> None:
        keep = torch.tensor(places, device=self.mask.device)
        mask = self.mask[keep]  # [kept rows, columns]
        drop_left = int((mask.cumsum(1) == 0).sum(1).min())  # columns that are padding in all kept rows
        for layer in self.cache.layers:
            layer.keep(keep, drop_left)
        self.mask = mask[:, drop_left:]
        if self.chosen is not None:
            self.chosen = self.chosen[keep][:, drop_left:]

    def add(self, *others: CachedRows) -> None:
        for layer, *same in zip(self.cache.layers, *(other.cache.layers for other in others), strict=True):
            layer.join(same)
        masks = [self.mask, *(other.mask for other in others)]  # [rows, columns] each
        longest = max(mask.shape[1] for mask in masks)
        self.mask = torch.cat([pad(mask, (longest - mask.shape[1], 0)) for mask in masks])
        recorded = [chosen for chosen in (self.chosen, *(other.chosen for other in others)) if chosen is not None]
        if recorded:
            self.chosen = torch.cat([pad(item, (0, 0, 0, 0, longest - item.shape[1], 0)) for item in recorded])

    def experts(self, place: int) -> Tensor | None:
        return None if self.chosen is None else self.chosen[place, self.mask[place].bool()]
