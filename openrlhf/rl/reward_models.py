"""Load reward models, and score whole samples or the steps of a sample.

An outcome reward model computes one score per sample, from its scalar head at the last token. A process reward model is
a language model that predicts a label after each step. `load_reward_model` reads the kind from the model's config.json.
Reinforcement learning scores trajectories (`score`, through `rl.models`); batch_inference and the reward server score
rows of tokens (`score_rows`). If a model is sharded over several processes, all of them must call it the same number
of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.config.sections.model import LoadingFlags
from openrlhf.data.process import one_token
from openrlhf.data.retokenization import Retokenizer
from openrlhf.data.shared_prefixes import Sequences
from openrlhf.data.tokens import check_fast
from openrlhf.models.forward import Network, Scores, TargetLogits
from openrlhf.models.load import load_causal_lm, load_scalar_model, read_config
from openrlhf.monitor import say
from openrlhf.rl.samples import Batching
from openrlhf.rl.workers import ModelRewards
from openrlhf.training.backend import Frozen
from openrlhf.training.build import make_frozen
from openrlhf.training.local import LocalFrozen
from openrlhf.training.processes import defers_weights, loading
from openrlhf.types import StepRewards, TokenRow, Trajectory

Row = NDArray[np.int32]  # token ids of one sequence
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {  # --prm_reduce: reduces [steps] to one number
    "min": lambda steps: steps.min(),
    "mean": lambda steps: steps.mean(),
    "last": lambda steps: steps[-1],
    "product": lambda steps: steps.prod(),
}


def load_reward_model(
    name: str,
    flags: LoadingFlags,
    device: torch.device,
    *,
    texts: Retokenizer,
    batching: Batching,
    head_prefix: str,
    normalize: bool,
    run: RLConfig | None = None,
) -> RewardModel:
    """Load an outcome or a process reward model, depending on its config.json.

    With `normalize`, scores of an outcome model are normalised by the mean and std in its config.json. `run` is the
    config of a training run, which may use DeepSpeed; other commands load the model in this process.
    """

    def freeze(model: PreTrainedModel) -> Frozen:
        network = Network(model, self_test=not flags.skip_self_test)
        if run is None:
            return LocalFrozen(network, device)
        return make_frozen(run, network, device, offload=run.critic.ref_reward_offload)

    saved, packing = read_config(name, flags).to_dict(), batching.layout.packing
    defer = run is not None and defers_weights(run)
    if "placeholder_token" in saved:  # written by train_prm
        check_fast(texts.own)
        with nullcontext() if run is None else loading(run, device):
            model = load_causal_lm(name, flags, device=device, packing=packing, defer=defer)
        return ProcessRewardModel(
            freeze(model),
            texts,
            batching,
            one_token(texts.own, saved["placeholder_token"], "placeholder_token in config.json"),
            tuple(one_token(texts.own, token, "reward_tokens in config.json") for token in saved["reward_tokens"]),
        )
    model = load_scalar_model(name, flags, device=device, packing=packing, head_prefix=head_prefix, defer=defer)
    if normalize and "mean" not in saved:
        say(f"--normalize_reward: {name} has no mean and std in its config.json, so its scores are not normalised")
    return OutcomeRewardModel(
        freeze(model),
        texts,
        batching,
        mean=saved.get("mean", 0.0) if normalize else 0.0,
        std=saved.get("std", 1.0) if normalize else 1.0,
    )


def share_vocabulary(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Return True if the other tokenizer has all of the policy's tokens with the same ids.

    It may have additional tokens: reward models often add a padding token.
    """
    return policy.get_vocab().items() <= other.get_vocab().items()


def rounds(batching: Batching, rows: Sequence[Row], model: Frozen) -> Iterator[tuple[list[int], list[Row]]]:
    """Yield micro-batches of rows, each with the indices of its rows in `rows`.

    Processes that share a sharded model must run it the same number of times, but a token budget may divide their rows
    into different numbers of micro-batches. A process with fewer of them repeats its first one, without indices.
    """
    parts = replace(batching, sharing_limit=model.network.sharing_limit).cut(Sequences(rows))
    # A collective call, which all processes must make before any forward pass.
    missing = model.most_rounds(len(parts)) - len(parts)
    for part in parts:
        yield part, [rows[place] for place in part]
    for _ in range(missing):
        yield [], [rows[place] for place in parts[0]]


@dataclass(frozen=True)
class OutcomeRewardModel:
    """Reward model for whole samples: the output of the scalar head at the last token, as (score - mean) / std."""

    model: Frozen
    texts: Retokenizer  # translates samples into the model's tokens
    batching: Batching
    weight: float = 1.0  # weight in the sum over reward models; `score` applies it, `score_rows` does not
    mean: float = 0.0
    std: float = 1.0

    def score(self, trajectories: Sequence[Trajectory]) -> ModelRewards:
        """Return the weighted reward of each sample."""
        scores = self.weight * self.score_rows([self.texts.ids(item) for item in trajectories])  # [samples]
        return ModelRewards(scores, scores, [()] * len(trajectories))

    def score_rows(self, rows: Sequence[Row]) -> Tensor:
        """Return the unweighted rewards [rows] of rows of the reward model's tokens."""
        scores = torch.zeros(len(rows))  # [rows]
        with self.model.on_device():
            for places, part in rounds(self.batching, rows, self.model):
                batch = self.batching.layout.batch([TokenRow(row, np.zeros(len(row), bool)) for row in part])
                found = self.model.forward(batch, Scores).scores.cpu()  # [rows of the micro-batch]
                scores[places] = found[: len(places)]  # repeated micro-batches have no indices
        return (scores - self.mean) / self.std


@dataclass(frozen=True)
class ProcessRewardModel:
    """Reward model for steps: the probability of the positive label (first of `reward_ids`) at the end of each step.

    A sample's score is its step scores reduced to one number.
    """

    model: Frozen
    texts: Retokenizer  # translates samples into the model's tokens
    batching: Batching
    placeholder_id: int  # the token that ends a step
    reward_ids: tuple[int, ...]  # the label tokens, the positive one first
    reduce: str = "min"  # a key of REDUCE
    weight: float = 1.0  # weight in the sum over reward models; `score` applies it, `score_rows` does not

    def score(self, trajectories: Sequence[Trajectory]) -> ModelRewards:
        """Return the weighted rewards of all steps that end in an action token; steps in the prompt are ignored."""
        rows = [self.texts.ids(item) for item in trajectories]
        found: list[StepRewards] = []  # for each sample, (index of the token that ends the step, probability)
        for item, row, good in zip(trajectories, rows, self._judge(rows), strict=True):
            places = self.texts.places(item, row, np.flatnonzero(self._ends_of_steps(row)))
            steps = zip(places, good.tolist(), strict=True)
            found.append(tuple((place, value) for place, value in steps if item.action_mask[place]))
        scores = self._reduce([torch.tensor([value for _, value in own]) for own in found])  # [samples]
        weighted = [tuple((place, self.weight * value) for place, value in own) for own in found]
        return ModelRewards(self.weight * scores, None, weighted)

    def score_rows(self, rows: Sequence[Row]) -> Tensor:
        """Return the unweighted rewards [rows] of rows of the reward model's tokens."""
        return self._reduce(self._judge(rows))

    def _reduce(self, steps: Sequence[Tensor]) -> Tensor:
        """Reduce the steps of each sample to one number, [samples]; 0 for a sample without a finished step."""
        reduce = REDUCE[self.reduce]
        return torch.tensor([float(reduce(own)) if len(own) else 0.0 for own in steps])

    def _ends_of_steps(self, row: Row) -> NDArray[np.bool_]:
        """Return a mask [tokens] of the tokens that end a step, excluding the first token of the row."""
        return (row == self.placeholder_id) & (np.arange(len(row)) > 0)

    def _judge(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the probabilities of the positive label for the steps of each row, [steps] each."""
        judged = [torch.zeros(0) for _ in rows]
        with self.model.on_device():
            for places, part in rounds(self.batching, rows, self.model):
                marks = [self._ends_of_steps(row) for row in part]  # [tokens] each
                has_steps = [bool(mark.any()) for mark in marks]
                for mark, has_step in zip(marks, has_steps, strict=True):
                    mark[
                        -1
                    ] |= not has_step  # dummy target for rows without steps, because every rank must run the model
                asked = self.batching.layout.batch([TokenRow(ids, mark) for ids, mark in zip(part, marks, strict=True)])
                logits = self.model.forward(asked, TargetLogits).logits  # [targets, vocabulary]
                positive = logits[:, list(self.reward_ids)].softmax(-1)[:, 0].cpu()  # [targets]
                steps = positive.split([int(mark[1:].sum()) for mark in marks])  # [steps] for each row
                for place, own, has_step in zip(
                    places, steps, has_steps, strict=False
                ):  # repeated micro-batches have no indices
                    judged[place] = own if has_step else own[:0]
        return judged


RewardModel: TypeAlias = OutcomeRewardModel | ProcessRewardModel
