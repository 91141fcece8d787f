"""Scorers: reward models that score whole samples (`OutcomeScorer`) or their steps (`ProcessScorer`).

Each scorer has its own tokenizer and may be sharded over several processes. Reinforcement learning scores
trajectories; batch_inference and the reward server score rows of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.data.collate import Layout
from openrlhf.data.readings import Texts
from openrlhf.models.forward import Scores, TargetLogits
from openrlhf.rl.samples import Batching
from openrlhf.rl.workers import ModelRewards
from openrlhf.training.backend import Frozen
from openrlhf.types import StepRewards, TokenRow, Trajectory

Row = NDArray[np.int32]


class Scorer(Protocol):
    """A reward model that scores samples."""

    def score(self, trajectories: Sequence[Trajectory]) -> ModelRewards:
        """Return a reward for each sample, already weighted."""
        ...

    def score_rows(self, rows: Sequence[Row]) -> Tensor:
        """Return an unweighted reward for each row of the model's own tokens: [rows]."""
        ...


def share_vocabulary(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Return whether the other tokenizer has all of the policy's tokens, with the same ids.

    It may have more: reward models often add a padding token.
    """
    return policy.get_vocab().items() <= other.get_vocab().items()


def rounds(batching: Batching, rows: Sequence[Row], model: Frozen) -> Iterator[tuple[list[int], list[Row]]]:
    """Yield micro-batches of rows, each with the places of its rows in `rows`.

    Processes that share a model's shards must run it equally often, but a token budget may cut their rows into
    different numbers of micro-batches. A process with fewer repeats its first micro-batch, without places.
    """
    parts = batching.cut([len(row) for row in rows])
    missing = model.most_rounds(len(parts)) - len(parts)  # a collective call, so it must come before any forward
    for part in parts:
        yield part, [rows[place] for place in part]
    for _ in range(missing):
        yield [], [rows[place] for place in parts[0]]


@dataclass(frozen=True)
class OutcomeScorer:
    """Scorer of whole samples: the scalar head at the last token, normalised as (score - mean) / std."""

    model: Frozen
    texts: Texts
    batching: Batching
    weight: float = 1.0
    mean: float = 0.0
    std: float = 1.0

    def score(self, trajectories: Sequence[Trajectory]) -> ModelRewards:
        scores = self.weight * self.score_rows([self.texts.ids(item) for item in trajectories])
        return ModelRewards(scores, scores, [()] * len(trajectories))

    def score_rows(self, rows: Sequence[Row]) -> Tensor:
        scores = torch.zeros(len(rows))  # [rows]
        for places, part in rounds(self.batching, rows, self.model):
            found = scores_of(part, self.model, self.batching.layout)  # [rows of the micro-batch]
            scores[places] = found[: len(places)]  # a repeated micro-batch has no places
        return (scores - self.mean) / self.std


def scores_of(rows: Sequence[Row], model: Frozen, layout: Layout) -> Tensor:
    """Return the scalar head's output at the last token of each row, from one forward: [rows], on the CPU."""
    batch = layout.batch([TokenRow(row, np.zeros(len(row), bool)) for row in rows])
    return model.forward(batch, Scores).scores.cpu()


REDUCE: dict[str, Any] = {
    "min": lambda steps: steps.min(),
    "mean": lambda steps: steps.mean(),
    "last": lambda steps: steps[-1],
    "product": lambda steps: steps.prod(),
}


@dataclass(frozen=True)
class ProcessScorer:
    """Scorer of steps: the probability of the positive label (the first of `reward_ids`) at the end of each step.

    The steps of a sample are also reduced to one number.
    """

    model: Frozen
    texts: Texts
    batching: Batching
    placeholder_id: int
    reward_ids: tuple[int, ...]
    reduce: str = "min"
    weight: float = 1.0

    def score(self, trajectories: Sequence[Trajectory]) -> ModelRewards:
        """Score the steps that the policy itself ended; steps in the prompt do not count."""
        rows = [self.texts.ids(item) for item in trajectories]
        found = [
            self._ended(item, row, good) for item, row, good in zip(trajectories, rows, self._judge(rows), strict=True)
        ]
        steps = [tuple((place, self.weight * value) for place, value in own) for own in found]
        scores = self._reduced([torch.tensor([value for _, value in own]) for own in found])
        return ModelRewards(self.weight * scores, None, steps)

    def score_rows(self, rows: Sequence[Row]) -> Tensor:
        return self._reduced(self._judge(rows))

    def _ended(self, item: Trajectory, row: Row, good: Tensor) -> StepRewards:
        """Return (place of the sample's token that ends the step, probability) for each step of the response."""
        places = self.texts.places(item, row, np.flatnonzero(self._marks(row)))
        return tuple(
            (place, value) for place, value in zip(places, good.tolist(), strict=True) if item.action_mask[place]
        )

    def _reduced(self, steps: Sequence[Tensor]) -> Tensor:
        """Reduce the steps of each sample to one number: [samples]. A response without a finished step gets 0."""
        reduce = REDUCE[self.reduce]
        return torch.tensor([float(reduce(own)) if len(own) else 0.0 for own in steps])

    def _marks(self, row: Row) -> NDArray[np.bool_]:
        """Mark the tokens that end a step: [tokens]. The first token of a row never counts."""
        return (row == self.placeholder_id) & (np.arange(len(row)) > 0)

    def _judge(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return for each row the probabilities that its steps are good: [steps] each."""
        judged = [torch.zeros(0) for _ in rows]
        for places, part in rounds(self.batching, rows, self.model):
            for place, good in zip(places, self._judged(part), strict=False):
                judged[place] = good
        return judged

    def _judged(self, rows: Sequence[Row]) -> list[Tensor]:
        """Judge the rows of one micro-batch in one forward; see `_judge`."""
        marks = [self._marks(row) for row in rows]
        shown = [bool(mark.any()) for mark in marks]
        for mark, seen in zip(marks, shown, strict=True):
            mark[-1] |= not seen  # all ranks of a sharded model must call it, so rows without steps get a dummy mark
        asked = self.batching.layout.batch([TokenRow(ids, mark) for ids, mark in zip(rows, marks, strict=True)])
        logits = self.model.forward(asked, TargetLogits).logits  # [targets, vocabulary]
        positive = logits[:, list(self.reward_ids)].softmax(-1)[:, 0].cpu()  # [targets]
        steps = positive.split([int(mark[1:].sum()) for mark in marks])  # [steps] for each row
        return [own if seen else own[:0] for own, seen in zip(steps, shown, strict=True)]
