"""Collate rows into one `Batch`: padded on the right, or packed into a single row. Every training loop uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openrlhf.types import Batch, LabelledRow, PairRow, StepRow, TokenRow

Row = TokenRow | PairRow | LabelledRow | StepRow


@dataclass(frozen=True)
class Layout:
    """How sequences of different lengths are combined into one tensor."""

    packing: bool
    pad_id: int

    def lay(self, arrays: Sequence[NDArray[Any]], fill: float) -> Tensor:
        """Combine arrays of [tokens] into [1, sum of tokens] (packed) or [sequences, longest], padded with `fill`."""
        if self.packing:
            return torch.from_numpy(np.concatenate(arrays))[None]
        filled = np.full((len(arrays), max(map(len, arrays))), fill, dtype=arrays[0].dtype)
        for row, array in zip(filled, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(filled)

    def batch(self, rows: Sequence[TokenRow], extras: Mapping[str, Tensor] | None = None) -> Batch:
        """Build a Batch, one sequence per row in `rows`; positions restart at 0 in each sequence."""
        positions = [np.arange(len(row.input_ids)) for row in rows]
        return Batch(
            input_ids=self.lay([row.input_ids for row in rows], self.pad_id).long(),
            position_ids=self.lay(positions, 0),
            sequence_ids=self.lay([np.full_like(place, number) for number, place in enumerate(positions)], -1),
            # nothing predicts the first token of a sequence
            target_mask=self.lay(
                [row.target_mask & (place > 0) for row, place in zip(rows, positions, strict=True)], False
            ),
            num_sequences=len(rows),
            extras=extras or {},
        )


def pad(rows: Sequence[TokenRow], pad_id: int) -> Batch:
    """Put one sequence in each row, padded on the right to the longest."""
    return Layout(packing=False, pad_id=pad_id).batch(rows)


def pack(rows: Sequence[TokenRow]) -> Batch:
    """Concatenate all sequences into a single row."""
    return Layout(packing=True, pad_id=0).batch(rows)


def collate(rows: Sequence[Row], *, packing: bool, pad_id: int) -> Batch:
    """Collate rows of one kind.

    For B pairs, the chosen responses are sequences 0 to B-1 and the rejected ones B to 2B-1, and extras has "margin"
    [pairs]. Labelled rows add "label" [sequences]. Step rows add "step_labels" [rows, tokens], which is NaN except at
    the last token of a step.
    """
    return BATCHES[type(rows[0])](rows, Layout(packing, pad_id))


def batch_tokens(rows: Sequence[TokenRow], layout: Layout) -> Batch:
    return layout.batch(rows)


def batch_pairs(rows: Sequence[PairRow], layout: Layout) -> Batch:
    margin = torch.tensor([row.margin for row in rows], dtype=torch.float32)
    return layout.batch([row.chosen for row in rows] + [row.rejected for row in rows], {"margin": margin})


def batch_labelled(rows: Sequence[LabelledRow], layout: Layout) -> Batch:
    label = torch.tensor([row.label for row in rows], dtype=torch.bool)
    return layout.batch([row.tokens for row in rows], {"label": label})


def batch_steps(rows: Sequence[StepRow], layout: Layout) -> Batch:
    labels = [np.full(len(row.input_ids), np.nan, dtype=np.float32) for row in rows]  # [tokens] each
    for row, label in zip(rows, labels, strict=True):
        label[row.step_places] = row.step_labels
    tokens = [TokenRow(row.input_ids, ~np.isnan(label)) for row, label in zip(rows, labels, strict=True)]
    return layout.batch(tokens, {"step_labels": layout.lay(labels, np.nan)})


BATCHES: dict[type, Callable[[Any, Layout], Batch]] = {
    TokenRow: batch_tokens,
    PairRow: batch_pairs,
    LabelledRow: batch_labelled,
    StepRow: batch_steps,
}
