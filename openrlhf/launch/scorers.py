"""Reward models: each scores whole samples with its own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.data.collate import Layout
from openrlhf.rl.samples import Batching
from openrlhf.training.backend import Frozen
from openrlhf.types import TokenRow, Trajectory


class Scorer(Protocol):
    """A reward for each sample, already weighted: [samples]."""

    def score(self, trajectories: Sequence[Trajectory]) -> Tensor: ...

    def score_rows(self, rows: Sequence[NDArray[np.int32]]) -> Tensor:
        """The same for sequences of the model's own tokens, without the weight."""
        ...


@dataclass(frozen=True)
class Texts:
    """Tokens of a sample for a model: the sampled ones where the vocabulary is shared, else the text read anew."""

    policy: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase
    shared: bool

    def ids(self, item: Trajectory) -> list[int]:
        ids = list(item.input_ids)
        if self.shared:
            return ids
        ended = ids[-1] == self.policy.eos_token_id
        text = self.policy.decode(ids[:-1] if ended else ids)
        read: list[int] = self.own(text, add_special_tokens=False)["input_ids"]
        return [*read, self.own.eos_token_id] if ended else read  # each calls its end by a name of its own


def share_vocabulary(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True when every token of the policy is the other's too; a reward model may have one more, for padding."""
    return policy.get_vocab().items() <= other.get_vocab().items()


@dataclass(frozen=True)
class OutcomeScorer:
    """A scalar head at the last token, normalised by the model's own statistics where asked."""

    model: Frozen
    texts: Texts
    batching: Batching
    weight: float = 1.0
    mean: float = 0.0
    std: float = 1.0

    def score(self, trajectories: Sequence[Trajectory]) -> Tensor:
        rows = [np.array(self.texts.ids(item), dtype=np.int32) for item in trajectories]
        return self.weight * self.score_rows(rows)

    def score_rows(self, rows: Sequence[NDArray[np.int32]]) -> Tensor:
        scores = torch.zeros(len(rows))
        for part in self.batching.cut([len(row) for row in rows]):
            scores[part] = scores_of([rows[place] for place in part], self.model, self.batching.layout)
        return (scores - self.mean) / self.std


def scores_of(rows: Sequence[NDArray[np.int32]], model: Frozen, layout: Layout) -> Tensor:
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
    """The probability of the positive label at each step's end, made one number."""

    model: Frozen
    texts: Texts
    batching: Batching
    placeholder_id: int
    reward_ids: tuple[int, ...]
    reduce: str = "min"
    weight: float = 1.0

    def score(self, trajectories: Sequence[Trajectory]) -> Tensor:
        rows = [np.array(self.texts.ids(item), dtype=np.int32) for item in trajectories]
        return self.weight * self.score_rows(rows)

    def score_rows(self, rows: Sequence[NDArray[np.int32]]) -> Tensor:
        scores = torch.zeros(len(rows))
        for part in self.batching.cut([len(row) for row in rows]):
            scores[part] = self._scores([rows[place] for place in part])
        return scores

    def _scores(self, rows: Sequence[NDArray[np.int32]]) -> Tensor:
        """All in one forward. A response without a finished step has shown nothing, and gets 0."""
        marks = [(ids == self.placeholder_id) & (np.arange(len(ids)) > 0) for ids in rows]
        shown = [bool(mark.any()) for mark in marks]
        for mark, seen in zip(marks, shown, strict=True):
            mark[-1] |= not seen  # a sharded model is called by all ranks or none, so there is always something to ask
        asked = self.batching.layout.batch([TokenRow(ids, mark) for ids, mark in zip(rows, marks, strict=True)])
        logits = self.model.forward(asked, "target_logits").target_logits
        assert logits is not None
        positive = logits[:, list(self.reward_ids)].softmax(-1)[:, 0].cpu()
        steps = positive.split([int(mark[1:].sum()) for mark in marks])  # nothing is asked of a first token
        reduce = REDUCE[self.reduce]
        return torch.tensor([float(reduce(part)) if seen else 0.0 for part, seen in zip(steps, shown, strict=True)])
