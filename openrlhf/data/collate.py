"""Collate rows into one batch: padded on the right, or packed into a single row.

Each kind of row has a corresponding kind of batch (`types.py`): tokens are combined in the same way for all, and labels
become a separate tensor. The supervised loop calls `collate` for each micro-batch; RL uses `Layout.batch`. For three
sequences of 2, 3 and 1 tokens, with padding `.`:

    padded   [[a a .]      packed   [[a a b b b c]]
              [b b b]
              [c . .]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openrlhf.data.shared_prefixes import Sequences, find_prefixes
from openrlhf.types import Batch, LabelledBatch, LabelledRow, PairBatch, PairRow, StepBatch, StepRow, TokenRow

Row = TokenRow | PairRow | LabelledRow | StepRow


@dataclass(frozen=True)
class Layout:
    """How sequences of different lengths are combined into one tensor."""

    packing: bool
    pad_id: int  # token id of the padding, which masks and sequence ids exclude
    sharing: bool = True  # describe prefixes that sequences share, for networks that compute them once

    def combine(self, arrays: Sequence[NDArray[np.generic]], fill: float) -> Tensor:
        """Combine arrays of [tokens] into [1, sum of tokens] (packed) or [sequences, longest], padded with `fill`.

        Arrays of [tokens, ...] keep their other dimensions.
        """
        if self.packing:
            return torch.from_numpy(np.concatenate(arrays))[None]
        shape = (len(arrays), max(map(len, arrays)), *arrays[0].shape[1:])
        filled = np.full(shape, fill, dtype=arrays[0].dtype)
        for row, array in zip(filled, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(filled)

    def batch(self, rows: Sequence[TokenRow]) -> Batch:
        """Build a Batch with one sequence per item of `rows`; positions restart at 0 in each sequence."""
        sequences, masks = [row.input_ids for row in rows], [row.target_mask.copy() for row in rows]
        for mask in masks:
            mask[:1] = False  # the first token of a sequence is never predicted
        return Batch(
            input_ids=self.combine(sequences, self.pad_id).long(),
            lengths=torch.tensor([len(sequence) for sequence in sequences]),
            target_mask=self.combine(masks, False),
            prefixes=find_prefixes(Sequences(sequences)) if self.sharing else None,
        )


def pad(rows: Sequence[TokenRow], pad_id: int) -> Batch:
    """Put one sequence in each row, padded on the right to the longest."""
    return Layout(packing=False, pad_id=pad_id).batch(rows)


def pack(rows: Sequence[TokenRow]) -> Batch:
    """Concatenate all sequences into a single row."""
    return Layout(packing=True, pad_id=0).batch(rows)


def collate(rows: Sequence[Any], *, packing: bool, pad_id: int) -> Batch:
    """Collate rows of one kind into the batch of that kind."""
    layout = Layout(packing, pad_id)
    match rows[0]:
        case PairRow():  # reward models and DPO: all chosen sequences, then all rejected ones in the same order
            margin = torch.tensor([row.margin for row in rows], dtype=torch.float32)  # [pairs]
            both = [row.chosen for row in rows] + [row.rejected for row in rows]
            return layout.batch(both).as_kind(PairBatch, margin=margin)
        case LabelledRow():  # KTO: one label per sequence
            label = torch.tensor([row.label for row in rows], dtype=torch.bool)  # [sequences]
            return layout.batch([row.tokens for row in rows]).as_kind(LabelledBatch, label=label)
        case StepRow():  # process reward models: the last token of each step is a target, with the step's label
            labels = [np.full(len(row.input_ids), np.nan, dtype=np.float32) for row in rows]  # [tokens] each
            for row, steps in zip(rows, labels, strict=True):
                steps[row.step_places] = row.step_labels
            tokens = [TokenRow(row.input_ids, ~np.isnan(steps)) for row, steps in zip(rows, labels, strict=True)]
            return layout.batch(tokens).as_kind(StepBatch, step_labels=layout.combine(labels, np.nan))
        case _:  # SFT and distillation: no labels
            return layout.batch(rows)
