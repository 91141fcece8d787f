"""Slower decoding strategies, for models on which continuous batching (decoding.py) gives wrong results.

    OwnCaches    a batch per prompt length, or per row, each with a cache created by the model
    Uncached     no cache: recompute the whole sequence for each token

decoding_check.py tests them in this order, after continuous batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from openrlhf.models.forward import Network, TargetLogits
from openrlhf.rollout.decoding import CachedForward, ModelCache, Tokens
from openrlhf.types import Batch


@dataclass(frozen=True)
class OwnCaches:
    """One batch per prompt length, or per row, each with a cache created by the model."""

    decoder: PreTrainedModel
    attention: str
    by_length: bool = True  # False: one row per batch

    def __str__(self) -> str:
        batch = "one batch for each prompt length" if self.by_length else "row by row"
        return f"{batch} with {self.attention} attention"

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[GroupedRows, Tensor]:
        forward = CachedForward(self.decoder)
        groups: list[CacheGroup] = []
        found: list[Tensor] = []
        for _, grouped in groupby(enumerate(prompts), lambda one: len(one[1]) if self.by_length else one[0]):
            alike = dict(grouped)  # index of the prompt -> prompt
            ids = torch.tensor([list(prompt) for prompt in alike.values()], device=self.decoder.device)
            logits, cache = forward(ids)  # [rows, vocabulary], from ids [rows, tokens]
            groups.append(CacheGroup(cache, [*alike]))
            found.append(logits)
        return GroupedRows(forward, groups, found[0].shape[-1]), torch.cat(found)


@dataclass
class CacheGroup:
    """The cache of a prefilled batch, and the current index of each of its rows; None for a removed row."""

    cache: ModelCache
    places: list[int | None]


@dataclass
class GroupedRows:
    """Rows of `OwnCaches`; a batch is kept until all of its rows have been removed."""

    forward: CachedForward
    groups: list[CacheGroup]
    vocabulary: int

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        device = self.forward.decoder.device
        found = torch.zeros(len(tokens), self.vocabulary, device=device)  # [rows, vocabulary]
        for group in self.groups:
            staying = [number for number, place in enumerate(group.places) if place is not None]
            places = [place for place in group.places if place is not None]
            if all(ended[place] for place in places):
                continue
            # [rows of the group, 1]; removed rows get an arbitrary token
            ids = torch.tensor([[0 if place is None else tokens[place]] for place in group.places], device=device)
            logits, group.cache = self.forward(ids, group.cache)
            found[places] = logits[staying].float()
        return found

    def keep(self, places: Sequence[int]) -> None:
        moved = {old: new for new, old in enumerate(places)}
        for group in self.groups:
            group.places = [None if place is None else moved.get(place) for place in group.places]
        self.groups = [group for group in self.groups if any(place is not None for place in group.places)]

    def add(self, other: GroupedRows) -> None:
        first = sum(place is not None for group in self.groups for place in group.places)
        for group in other.groups:
            places = [None if place is None else place + first for place in group.places]
            self.groups.append(CacheGroup(group.cache, places))

    def experts(self, place: int) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Uncached:
    """Decoding without a cache: recompute whole sequences for each token, in the layout of training or row by row.

    This is slow, but correct for every model if rows are computed one by one.
    """

    network: Network
    attention: str | None = None
    row_by_row: bool = False

    def __str__(self) -> str:
        return "whole sequences for each token, without a cache" + (", row by row" if self.row_by_row else "")

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[WholeRows, Tensor]:
        rows = WholeRows(self, [list(prompt) for prompt in prompts])
        return rows, self.compute_logits(rows.sequences)

    def compute_logits(self, sequences: Sequence[Tokens]) -> Tensor:
        """Return the logits [rows, vocabulary] of the token after each sequence."""
        device = self.network.decoder.device
        rows = [torch.tensor(list(sequence), device=device) for sequence in sequences]  # [tokens] each
        if self.row_by_row:
            decoder = self.network.decoder
            return torch.cat([decoder(input_ids=row[None], use_cache=False).logits[:, -1] for row in rows])
        ids = pad_sequence(rows, batch_first=True)  # [rows, tokens]
        lengths = torch.tensor([len(row) for row in rows], device=device)  # [rows]
        last = torch.arange(ids.shape[1], device=device) == lengths[:, None] - 1  # [rows, tokens]
        batch = Batch(input_ids=ids, lengths=lengths, target_mask=last)
        return self.network(batch, TargetLogits).logits


@dataclass
class WholeRows:
    """Rows of `Uncached`, which consist of their tokens only."""

    strategy: Uncached
    sequences: list[list[int]]

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        for sequence, token, is_over in zip(self.sequences, tokens, ended, strict=True):
            if not is_over:
                sequence.append(token)
        return self.strategy.compute_logits(self.sequences)

    def keep(self, places: Sequence[int]) -> None:
        self.sequences = [self.sequences[place] for place in places]

    def add(self, other: WholeRows) -> None:
        self.sequences += other.sequences

    def experts(self, place: int) -> Tensor | None:
        return None
