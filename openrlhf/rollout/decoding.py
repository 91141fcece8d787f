"""Ways to decode: how rows that come and go get the logits of their next token.

    prefill(prompts) -> rows, logits        the model reads prompts
    rows.step(tokens, ended) -> logits      one more token for each row
    rows.keep(places), rows.add(others)     rows leave, rows join

A model's own forward gives the logits, so whatever it does to them after its head is done here too. Which way is right
for a model is not known from its name: `decoding_check.py` tries them.
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

from openrlhf.models.forward import Network
from openrlhf.models.running import attention_in, attention_of
from openrlhf.rollout.cache import RowCache
from openrlhf.types import Batch

Tokens = Sequence[int]
CACHES = ("past_key_values", "cache_params", "state")  # what a forward calls its cache, family by family


class DecodingRows(Protocol):
    """Rows on their way, with everything that the model remembers of them."""

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        """Logits [rows, vocabulary] after one more token of each row; those of a row that ended mean nothing."""
        ...

    def keep(self, places: Sequence[int]) -> None:
        """Only these rows, in this order."""
        ...

    def add(self, others: Sequence[Self]) -> None:
        """Rows of other prefills below these."""
        ...


class Decoding(Protocol):
    """A way to decode."""

    @property
    def description(self) -> str: ...

    @property
    def attention(self) -> str | None:
        """The attention implementation that it needs; None leaves the model's own."""
        ...

    def prefill(self, prompts: Sequence[Tokens]) -> tuple[DecodingRows, Tensor]:
        """The rows of these prompts, and logits [rows, vocabulary] of their first tokens."""
        ...


@contextmanager
def evaluating(decoder: PreTrainedModel, attention: str | None) -> Iterator[None]:
    """The model in evaluation mode with this attention; afterwards as it was before."""
    training = decoder.training
    decoder.eval()
    try:
        with attention_of(decoder, attention or attention_in(decoder)):
            yield
    finally:
        decoder.train(training)


class Forward:
    """A model's own forward for the last token, with those arguments that it knows."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.decoder = decoder
        self.known = {*inspect.signature(decoder.forward).parameters}
        self.known |= {*inspect.signature(decoder.base_model.forward).parameters}
        self.cache_name = next((name for name in CACHES if name in self.known), None)

    def __call__(self, input_ids: Tensor, cache: Any = None, **arguments: Tensor) -> tuple[Tensor, Any]:
        """(logits [rows, vocabulary], the cache with these tokens in it)."""
        if self.cache_name is None:
            raise NotImplementedError(f"{type(self.decoder).__name__} has no cache")
        given = arguments | {self.cache_name: cache, "use_cache": True, "logits_to_keep": 1}
        model: Any = self.decoder
        outputs = model(input_ids=input_ids, **{name: value for name, value in given.items() if name in self.known})
        return outputs.logits[:, -1], vars(outputs).get(self.cache_name)


@dataclass(frozen=True)
class ContinuousBatching:
    """All rows in one batch over a cache whose rows come and go. The fastest way."""

    decoder: PreTrainedModel
    attention: str
    pads_prompts: bool = True  # else only prompts of one length are read together: padding would change their states

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
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for number, prompt in enumerate(prompts):
            ids[number, longest - len(prompt) :] = torch.tensor(prompt)
            mask[number, longest - len(prompt) :] = 1
        device = self.decoder.device
        rows = CachedRows(Forward(self.decoder), RowCache(self.decoder.config), mask.to(device))
        return rows, rows.advance(ids.to(device), ended=())


@dataclass
class CachedRows:
    """Rows of continuous batching."""

    forward: Forward
    cache: RowCache
    mask: Tensor  # [rows, columns]: 1 where a token stands, 0 on the padding at the left

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        return self.advance(torch.tensor(tokens, device=self.mask.device)[:, None], ended)

    def advance(self, ids: Tensor, ended: Sequence[bool]) -> Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        # Until their places are cleared, rows that ended might pass the last position that the model knows.
        positions[[number for number, is_over in enumerate(ended) if is_over]] = 0
        arguments = {"attention_mask": self.mask, "position_ids": positions}
        if ids.shape[1] == 1 and not self.cache.has_columns:
            del arguments["attention_mask"]  # without attention a mask is for the tokens of this call
        return self.forward(ids, self.cache, **arguments)[0]

    def keep(self, places: Sequence[int]) -> None:
        keep = torch.tensor(places, device=self.mask.device)
        mask = self.mask[keep]
        drop_left = int((mask.cumsum(1) == 0).sum(1).min())
        self.cache.keep_rows(keep, drop_left)
        self.mask = mask[:, drop_left:]

    def add(self, others: Sequence[CachedRows]) -> None:
        self.cache.add_rows(*(other.cache for other in others))
        masks = [self.mask, *(other.mask for other in others)]
        longest = max(mask.shape[1] for mask in masks)
        self.mask = torch.cat([torch.nn.functional.pad(mask, (longest - mask.shape[1], 0)) for mask in masks])


@dataclass(frozen=True)
class OwnCaches:
    """Each batch has a cache of the model's own making, which is not taken apart: prompts of one length, or one row."""

    decoder: PreTrainedModel
    attention: str
    by_length: bool = True

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
            ids = torch.tensor([list(prompt) for _, prompt in batch], device=self.decoder.device)
            logits, cache = forward(ids)
            groups.append(Group(cache, list(range(first, first + len(ids)))))
            found.append(logits)
            first += len(ids)
        return GroupedRows(forward, groups, found[0].shape[-1]), torch.cat(found)


@dataclass
class Group:
    """A batch as it was prefilled, and the place of each of its rows; None for one that left."""

    cache: Any
    places: list[int | None]


@dataclass
class GroupedRows:
    """Rows of batches that stay whole until all of their rows have left."""

    forward: Forward
    groups: list[Group]
    vocabulary: int

    def step(self, tokens: Tokens, ended: Sequence[bool]) -> Tensor:
        device = self.forward.decoder.device
        found = torch.zeros(len(tokens), self.vocabulary, device=device)
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
    """Whole sequences again for each token: slow. As training reads them, or row by row, which is always right."""

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
        """Logits [rows, vocabulary] after each sequence."""
        device = self.network.decoder.device
        rows = [torch.tensor(list(sequence), device=device) for sequence in sequences]
        if self.row_by_row:
            model: Any = self.network.decoder
            return torch.cat([model(input_ids=row[None], use_cache=False).logits[:, -1] for row in rows])
        ids = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        numbers, places = torch.arange(len(ids), device=device)[:, None], torch.arange(ids.shape[1], device=device)
        batch = Batch(
            input_ids=ids,
            position_ids=torch.where(places < lengths, places, 0),
            sequence_ids=torch.where(places < lengths, numbers, -1),
            target_mask=places == lengths - 1,
            num_sequences=len(ids),
        )
        logits = self.network(batch, "target_logits").target_logits
        assert logits is not None
        return logits


@dataclass
class WholeRows:
    """Rows without a cache: their tokens."""

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
