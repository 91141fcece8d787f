"""Reward models: each scores whole samples, or their steps, with its own tokenizer."""

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
from openrlhf.launch.readings import Texts
from openrlhf.rl.samples import Batching
from openrlhf.rl.workers import ModelRewards
from openrlhf.training.backend import Frozen
from openrlhf.types import StepRewards, TokenRow, Trajectory

Row = NDArray[np.int32]


class Scorer(Protocol):
    """A reward for each sample, already weighted."""

    def score(self, trajectories: Sequence[Trajectory]) -> ModelRewards: ...

    def score_rows(self, rows: Sequence[Row]) -> Tensor:
        """The same for sequences of the model's own tokens, one number each and without the weight: [rows]."""
        ...


def share_vocabulary(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True when every token of the policy is the other's too; a reward model may have one more, for padding."""
    return policy.get_vocab().items() <= other.get_vocab().items()


def rounds(batching: Batching, rows: Sequence[Row], model: Frozen) -> Iterator[tuple[list[int], list[Row]]]:
    """Micro-batches of rows: their places, and they themselves.

    Processes that share a model's shards must run it equally often, and a token budget may cut their rows into
    different numbers of micro-batches. A process with fewer repeats its first one, with no places.
    """
    parts = batching.cut([len(row) for row in rows])
    missing = model.most_rounds(len(parts)) - len(parts)  # before any forward: processes ask each other
    for part in parts:
        yield part, [rows[place] for place in part]
    for _ in range(missing):
        yield [], [rows[place] for place in parts[0]]


@dataclass(frozen=True)
class OutcomeScorer:
    """A scalar head at the last token, normalised by the model's own statistics if asked."""

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
        scores = torch.zeros(len(rows))
        for places, part in rounds(self.batching, rows, self.model):
            found = scores_of(part, self.model, self.batching.layout)
            scores[places] = found[: len(places)]
        return (scores - self.mean) / self.std


def scores_of(rows: Sequence[Row], model: Frozen, layout: Layout) -> Tensor:
    """The scalar head at the last token of each row, all in one forward: [rows], on the CPU."""
    scores = model.forward(layout.batch([TokenRow(row, np.zeros(len(row), bool)) for row in rows]), "scores").scores
    assert scores is not None
    return scores.cpu()


REDUCE: dict[str, Any] = {
    "min": lambda steps: steps.min(),
    "mean": lambda steps: steps.mean(),
    "last": lambda steps: steps[-1],
    "product": lambda steps: steps.prod(),
}


@dataclass(frozen=True)
class ProcessScorer:
    """The probability of the positive label at each step's end, step by step and reduced to one number."""

    model: Frozen
    texts: Texts
    batching: Batching
    placeholder_id: int
    reward_ids: tuple[int, ...]
    reduce: str = "min"
    weight: float = 1.0

    def score(self, trajectories: Sequence[Trajectory]) -> ModelRewards:
        """Steps count that the policy ended itself: a prompt may show some, too."""
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
        """(place of the sample's token with which a step ends, probability) for the steps of the response."""
        places = self.texts.places(item, row, np.flatnonzero(self._marks(row)))
        return tuple(
            (place, value) for place, value in zip(places, good.tolist(), strict=True) if item.action_mask[place]
        )

    def _reduced(self, steps: Sequence[Tensor]) -> Tensor:
        """[samples]. A response without a finished step has shown nothing, and gets 0."""
        reduce = REDUCE[self.reduce]
        return torch.tensor([float(reduce(own)) if len(own) else 0.0 for own in steps])

    def _marks(self, row: Row) -> NDArray[np.bool_]:
        """Where steps end; nothing is asked of a first token."""
        return (row == self.placeholder_id) & (np.arange(len(row)) > 0)

    def _judge(self, rows: Sequence[Row]) -> list[Tensor]:
        """For each row the probabilities that its steps are good: [steps] each."""
        judged = [torch.zeros(0) for _ in rows]
        for places, part in rounds(self.batching, rows, self.model):
            for place, good in zip(places, self._judged(part), strict=False):
                judged[place] = good
        return judged

    def _judged(self, rows: Sequence[Row]) -> list[Tensor]:
        """The same, all in one forward."""
        marks = [self._marks(row) for row in rows]
        shown = [bool(mark.any()) for mark in marks]
        for mark, seen in zip(marks, shown, strict=True):
            mark[-1] |= not seen  # a sharded model is called by all ranks or none, so there is always something to ask
        asked = self.batching.layout.batch([TokenRow(ids, mark) for ids, mark in zip(rows, marks, strict=True)])
        logits = self.model.forward(asked, "target_logits").target_logits
        assert logits is not None
        positive = logits[:, list(self.reward_ids)].softmax(-1)[:, 0].cpu()
        steps = positive.split([int(mark[1:].sum()) for mark in marks])
        return [own if seen else own[:0] for own, seen in zip(steps, shown, strict=True)]
