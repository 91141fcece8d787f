"""Decoding strategies: how rows that start and finish at different times get the logits of their next token.

    prefill(prompts) -> rows, logits        run the model over prompts
    rows.step(tokens, ended) -> logits      append one token to each row
    rows.keep(places), rows.add(others)     remove rows, add rows

The logits include everything that a model's own forward does to them after its head. The name of a model does not tell
which strategy is correct for it, so `decoding_check.py` tries them; `HFEngine` uses the one it chose.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from openrlhf.models.forward import Network, TargetLogits
from openrlhf.models.running import attention_in, attention_of
from openrlhf.rollout.cache import RowCache
from openrlhf.types import Batch

Tokens = Sequence[int]
CACHES = ("past_key_values", "cache_params", "state")  # names of the cache argument in different families


class DecodingRows(Protocol):
    """Running rows with everything that the model has cached for them."""

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        """Append a token to each row; return logits [rows, vocabulary], meaningless for rows that have ended."""
        ...

    def keep(self, places: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...

    def add(self, others: Sequence[Self]) -> None:
        """Append the rows of other prefills."""
        ...


class Decoding(Protocol):
    """A decoding strategy."""

    @property
    def description(self) -> str: ...

    @property
    def attention(self) -> str | None:
        """Attention implementation that the strategy needs; None keeps the model's own."""
        ...

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[DecodingRows, Tensor]:
        """Run the model over prompts; return their rows, and logits [rows, vocabulary] of the first new tokens."""
        ...


@contextmanager
def evaluating(decoder: PreTrainedModel, attention: str | None) -> Iterator[None]:
    """Put the model into evaluation mode with this attention, and restore both on exit."""
    training = decoder.training
    decoder.eval()
    try:
        with attention_of(decoder, attention or attention_in(decoder)):
            yield
    finally:
        decoder.train(training)


class Forward:
    """A model's own forward for the last token, called with only those arguments that it accepts."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.decoder = decoder
        self.known = {*inspect.signature(decoder.forward).parameters}
        self.known |= {*inspect.signature(decoder.base_model.forward).parameters}
        self.cache_name = next((name for name in CACHES if name in self.known), None)

    def __call__(self, input_ids: Tensor, cache: Any = None, **arguments: Tensor) -> tuple[Tensor, Any]:
        """Return (logits [rows, vocabulary], the cache including these tokens) for input_ids [rows, tokens]."""
        if self.cache_name is None:
            raise NotImplementedError(f"{type(self.decoder).__name__} has no cache")
        given = arguments | {self.cache_name: cache, "use_cache": True, "logits_to_keep": 1}
        model: Any = self.decoder
        outputs = model(input_ids=input_ids, **{name: value for name, value in given.items() if name in self.known})
        return outputs.logits[:, -1], vars(outputs).get(self.cache_name)


@dataclass(frozen=True)
class ContinuousBatching:
    """One batch of all rows, over a cache that rows enter and leave. The fastest strategy."""

    decoder: PreTrainedModel
    attention: str
    pads_prompts: bool = True  # False: prefill only prompts of equal length together, if padding changes their states

    @property
    def description(self) -> str:
        prompts = "" if self.pads_prompts else ", prompts read by length"
        return f"continuous batching with {self.attention} attention{prompts}"

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[CachedRows, Tensor]:
        if self.pads_prompts:
            return self._read(prompts)
        read = [self._read(list(alike)) for _, alike in groupby(prompts, len)]
        rows = read[0][0]
        rows.add([other for other, _ in read[1:]])
        return rows, torch.cat([logits for _, logits in read])

    def _read(self, prompts: Sequence[Tokens]) -> tuple[CachedRows, Tensor]:
        """Prefill prompts in one call, padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)  # [rows, columns], as is the mask
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for number, prompt in enumerate(prompts):
            ids[number, longest - len(prompt) :] = torch.tensor(prompt)
            mask[number, longest - len(prompt) :] = 1
        device = self.decoder.device
        rows = CachedRows(Forward(self.decoder), RowCache(self.decoder.config), mask.to(device))
        return rows, rows.advance(ids.to(device), ended=())


@dataclass
class CachedRows:
    """Rows of `ContinuousBatching`."""

    forward: Forward
    cache: RowCache
    mask: Tensor  # [rows, columns]: 1 for a token, 0 for the padding on the left

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        return self.advance(torch.tensor(tokens, device=self.mask.device)[:, None], ended)

    def advance(self, ids: Tensor, ended: Sequence[bool]) -> Tensor:
        """Run the model over new tokens [rows, new tokens], which the mask already counts; return the last logits."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]  # [rows, new tokens]
        # Rows that have ended stay until they are removed, and could pass the last position that the model supports.
        positions[[number for number, is_over in enumerate(ended) if is_over]] = 0
        arguments = {"attention_mask": self.mask, "position_ids": positions}
        if ids.shape[1] == 1 and not self.cache.has_columns:
            del arguments["attention_mask"]  # a model without attention expects a mask of this call's tokens only
        return self.forward(ids, self.cache, **arguments)[0]

    def keep(self, places: Sequence[int]) -> None:
        keep = torch.tensor(places, device=self.mask.device)
        mask = self.mask[keep]
        drop_left = int((mask.cumsum(1) == 0).sum(1).min())  # columns that are padding in all rows kept
        self.cache.keep_rows(keep, drop_left)
        self.mask = mask[:, drop_left:]

    def add(self, others: Sequence[CachedRows]) -> None:
        self.cache.add_rows(*(other.cache for other in others))
        masks = [self.mask, *(other.mask for other in others)]
        longest = max(mask.shape[1] for mask in masks)
        self.mask = torch.cat([torch.nn.functional.pad(mask, (longest - mask.shape[1], 0)) for mask in masks])


@dataclass(frozen=True)
class OwnCaches:
    """Batches that each keep the cache which the model made for them: prompts of equal length, or a single row."""

    decoder: PreTrainedModel
    attention: str
    by_length: bool = True  # False: one row per batch

    @property
    def description(self) -> str:
        batch = "one batch for each prompt length" if self.by_length else "row by row"
        return f"{batch} with {self.attention} attention"

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[GroupedRows, Tensor]:
        forward = Forward(self.decoder)
        groups: list[Group] = []
        found: list[Tensor] = []
        first = 0
        for _, batch in groupby(enumerate(prompts), lambda one: len(one[1]) if self.by_length else one[0]):
            ids = torch.tensor([list(prompt) for _, prompt in batch], device=self.decoder.device)  # [batch, tokens]
            logits, cache = forward(ids)
            groups.append(Group(cache, list(range(first, first + len(ids)))))
            found.append(logits)
            first += len(ids)
        return GroupedRows(forward, groups, found[0].shape[-1]), torch.cat(found)


@dataclass
class Group:
    """A batch as it was prefilled, and the current index of each of its rows; None for a row that has left."""

    cache: Any
    places: list[int | None]


@dataclass
class GroupedRows:
    """Rows of `OwnCaches`: a batch stays whole until all of its rows have left."""

    forward: Forward
    groups: list[Group]
    vocabulary: int

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        device = self.forward.decoder.device
        found = torch.zeros(len(tokens), self.vocabulary, device=device)  # [rows, vocabulary]
        for group in self.groups:
            staying = [number for number, place in enumerate(group.places) if place is not None]
            places = [place for place in group.places if place is not None]
            if all(ended[place] for place in places):
                continue
            ids = torch.tensor([[0 if place is None else tokens[place]] for place in group.places], device=device)
            logits, group.cache = self.forward(ids, group.cache)
            found[places] = logits[staying].float()
        return found

    def keep(self, places: Sequence[int]) -> None:
        moved = {old: new for new, old in enumerate(places)}
        for group in self.groups:
            group.places = [None if place is None else moved.get(place) for place in group.places]
        self.groups = [group for group in self.groups if any(place is not None for place in group.places)]

    def add(self, others: Sequence[GroupedRows]) -> None:
        for other in others:
            first = sum(place is not None for group in self.groups for place in group.places)
            for group in other.groups:
                places = [None if place is None else place + first for place in group.places]
                self.groups.append(Group(group.cache, places))


@dataclass(frozen=True)
class Uncached:
    """Whole sequences recomputed for each token: slow. In training's layout, or row by row, which is always correct."""

    network: Network
    attention: str | None = None
    row_by_row: bool = False

    @property
    def description(self) -> str:
        return "whole sequences for each token, without a cache" + (", row by row" if self.row_by_row else "")

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[WholeRows, Tensor]:
        rows = WholeRows(self, [list(prompt) for prompt in prompts])
        return rows, self.read(rows.sequences)

    def read(self, sequences: Sequence[Tokens]) -> Tensor:
        """Return the logits [rows, vocabulary] after each sequence."""
        device = self.network.decoder.device
        rows = [torch.tensor(list(sequence), device=device) for sequence in sequences]
        if self.row_by_row:
            model: Any = self.network.decoder
            return torch.cat([model(input_ids=row[None], use_cache=False).logits[:, -1] for row in rows])
        ids = pad_sequence(rows, batch_first=True)  # [rows, tokens]
        lengths = torch.tensor([[len(row)] for row in rows], device=device)  # [rows, 1]
        numbers, places = torch.arange(len(ids), device=device)[:, None], torch.arange(ids.shape[1], device=device)
        batch = Batch(
            input_ids=ids,
            position_ids=torch.where(places < lengths, places, 0),
            sequence_ids=torch.where(places < lengths, numbers, -1),
            target_mask=places == lengths - 1,
            num_sequences=len(ids),
        )
        return self.network(batch, TargetLogits).logits


@dataclass
class WholeRows:
    """Rows of `Uncached`: just their tokens."""

    way: Uncached
    sequences: list[list[int]]

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        for sequence, token, is_over in zip(self.sequences, tokens, ended, strict=True):
            if not is_over:
                sequence.append(token)
        return self.way.read(self.sequences)

    def keep(self, places: Sequence[int]) -> None:
        self.sequences = [self.sequences[place] for place in places]

    def add(self, others: Sequence[WholeRows]) -> None:
        self.sequences += [sequence for other in others for sequence in other.sequences]
