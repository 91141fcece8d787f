"""The six supervised objectives: SFT, distillation, pairwise reward, DPO, KTO and process reward.

Each says which outputs it needs from the network and which formula of `algo` it applies to them. `Fit` calls `prepare`
before a step; the backend then calls `counts` and `loss` for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from openrlhf.algo import preference_loss, token_loss
from openrlhf.algo.reduce import Mean, Metrics, masked_log_probs, mean_of, sequence_means, sequence_sums
from openrlhf.data.collate import collate
from openrlhf.data.unpaired import mismatched
from openrlhf.models.forward import Outputs
from openrlhf.training.backend import Frozen, Objective, Run, TrainBackend, with_extras
from openrlhf.training.order import micro_batches as cut
from openrlhf.training.order import num_micro_batches
from openrlhf.types import Batch, LabelledRow

AUX_ON = 1e-8  # a coefficient up to this one switches its term off


@dataclass(frozen=True)
class Step:
    """The rows of one optimizer step: all of them, and the positions of this rank's share."""

    rows: Sequence[Any]
    mine: Sequence[int]
    micro_size: int


class SupervisedObjective(Objective, Protocol):
    """An objective of the supervised loop; `prepare` may run a frozen model before the step and add to the extras."""

    def prepare(self, batches: list[Batch], step: Step, policy: TrainBackend, frozen: Frozen | None) -> list[Batch]: ...


def count(*numbers: Tensor | int) -> Tensor:
    """Stack the denominators of a micro-batch; the last counts the micro-batch itself, for the auxiliary loss."""
    return torch.tensor([*map(float, numbers), 1.0], dtype=torch.float64)


def add_aux(loss: Tensor, metrics: Metrics, outputs: Outputs, coef: float, totals: Tensor) -> tuple[Tensor, Metrics]:
    """Add the load-balancing loss of a mixture of experts, averaged over micro-batches.

    It is the only term that depends on how a step is split into micro-batches.
    """
    if outputs.aux_loss is None:
        return loss, metrics
    metrics = {**metrics, "aux_loss": mean_of(outputs.aux_loss.detach().reshape(1))}
    return loss + coef * outputs.aux_loss / totals[-1].to(outputs.aux_loss), metrics


@dataclass(frozen=True)
class SFT:
    """Mean negative log-likelihood of the step's target tokens."""

    aux_loss_coef: float = 0.0

    def prepare(self, batches: list[Batch], step: Step, policy: TrainBackend, frozen: Frozen | None) -> list[Batch]:
        return batches

    def counts(self, batch: Batch) -> Tensor:
        return count(batch.target_mask.sum())

    def loss(self, run: Run, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        outputs = run(batch, "log_probs")
        assert outputs.log_probs is not None
        loss, metrics = token_loss.sft_loss(outputs.log_probs, batch.target_mask, totals[0])
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class Distillation:
    """Cross entropy with the data, mixed with cross entropy with a teacher's distribution at the same positions."""

    kd_coef: float
    aux_loss_coef: float = 0.0
    teacher: Frozen | None = None

    def prepare(self, batches: list[Batch], step: Step, policy: TrainBackend, frozen: Frozen | None) -> list[Batch]:
        assert frozen is not None, "distillation needs a teacher"
        return [with_extras(batch, teacher=_hidden(frozen.forward(batch, "hidden"))) for batch in batches]

    def counts(self, batch: Batch) -> Tensor:
        return count(batch.target_mask.sum())

    def loss(self, run: Run, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        assert self.teacher is not None, "distillation needs a teacher"
        hidden = batch.extras["teacher"]
        outputs = run(batch, "distillation", teacher_hidden=hidden, teacher_head=self.teacher.head)
        assert outputs.log_probs is not None
        assert outputs.cross is not None
        loss, metrics = token_loss.kd_loss(outputs.log_probs, outputs.cross, batch.target_mask, totals[0], self.kd_coef)
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class PairwiseReward:
    """Reward model on pairs: a scalar per response, which should be higher for the preferred one."""

    loss_type: str = "sigmoid"
    use_margin: bool = False
    aux_loss_coef: float = 0.0

    def prepare(self, batches: list[Batch], step: Step, policy: TrainBackend, frozen: Frozen | None) -> list[Batch]:
        return batches

    def counts(self, batch: Batch) -> Tensor:
        return count(batch.num_sequences // 2)

    def loss(self, run: Run, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        outputs = run(batch, "scores")
        assert outputs.scores is not None
        chosen, rejected = outputs.scores.chunk(2)  # [2 x pairs] to [pairs] each
        margin = batch.extras["margin"] if self.use_margin else None
        loss, metrics = preference_loss.REWARD_LOSSES[self.loss_type](chosen, rejected, totals[0], margin)
        scores = outputs.scores.detach().double()
        metrics |= {
            "loss": _share(loss, totals[0], chosen.numel()),
            "_score": mean_of(scores),
            "_score_squared": mean_of(scores.square()),
        }
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class DirectPreference:
    """DPO, cDPO or IPO on pairs; `prepare` computes the reference's log-probs before the step."""

    beta: float
    ipo: bool = False
    length_average: bool = False
    label_smoothing: float = 0.0
    nll_loss_coef: float = 0.0
    aux_loss_coef: float = 0.0

    def prepare(self, batches: list[Batch], step: Step, policy: TrainBackend, frozen: Frozen | None) -> list[Batch]:
        assert frozen is not None, "DPO needs a reference"
        return [
            with_extras(batch, reference=self._sums(frozen.forward(batch, "log_probs"), batch)) for batch in batches
        ]

    def counts(self, batch: Batch) -> Tensor:
        return count(batch.num_sequences // 2)

    def loss(self, run: Run, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        outputs = run(batch, "log_probs")
        # Log-ratios of policy to reference, [2 x pairs] to [pairs] each.
        chosen, rejected = (self._sums(outputs, batch) - batch.extras["reference"]).chunk(2)
        if self.ipo:
            loss, metrics = preference_loss.ipo(chosen, rejected, self.beta, totals[0])
        else:
            loss, metrics = preference_loss.dpo(chosen, rejected, self.beta, totals[0], self.label_smoothing)
        metrics["loss"] = _share(loss, totals[0], chosen.numel())
        if self.nll_loss_coef > AUX_ON:
            nll, measured = self._nll(outputs, batch, totals[0])
            loss, metrics = loss + self.nll_loss_coef * nll, metrics | measured
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)

    def _sums(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the log-prob of each response, [sequences]: summed, or for IPO optionally averaged, as in TRL."""
        assert outputs.log_probs is not None
        mask = batch.target_mask.to(outputs.log_probs.device)
        ids = batch.sequence_ids.to(mask.device)
        per_sequence = sequence_means if self.ipo and self.length_average else sequence_sums
        return per_sequence(masked_log_probs(outputs.log_probs, mask), mask, ids, batch.num_sequences)

    def _nll(self, outputs: Outputs, batch: Batch, total: Tensor) -> tuple[Tensor, Metrics]:
        assert outputs.log_probs is not None
        is_chosen = batch.sequence_ids < batch.num_sequences // 2
        mask = batch.target_mask & is_chosen
        loss, metrics = preference_loss.chosen_nll(outputs.log_probs, mask, total, batch.sequence_ids)
        return loss, {"nll_loss": metrics["nll"]}


@dataclass(frozen=True)
class UnpairedPreference:
    """KTO: compare each response with a baseline that the whole step shares."""

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    aux_loss_coef: float = 0.0
    packing: bool = False
    pad_id: int = 0
    max_len: int = 2048

    def prepare(self, batches: list[Batch], step: Step, policy: TrainBackend, frozen: Frozen | None) -> list[Batch]:
        assert frozen is not None, "KTO needs a reference"
        baseline = preference_loss.kto_baseline(self._mismatch(step, policy, frozen))
        return [
            with_extras(batch, reference=_sequence_sums(frozen.forward(batch, "log_probs"), batch), baseline=baseline)
            for batch in batches
        ]

    def _mismatch(self, step: Step, policy: TrainBackend, frozen: Frozen) -> Mean:
        """Average the log-ratios of each prompt with the next row's response over the whole step and all ranks."""
        rows: Sequence[LabelledRow] = step.rows
        pairs = mismatched(rows, self.max_len)
        total = torch.zeros(2, dtype=torch.float64)
        parts = cut([pairs[place] for place in step.mine], step.micro_size)
        looks_each = num_micro_batches(len(rows), policy.data_parallel_size, step.micro_size)
        for _ in range(looks_each - len(parts)):  # a sharded model runs on all ranks together
            filler = collate(pairs[:1], packing=self.packing, pad_id=self.pad_id)
            policy.forward(filler, "log_probs"), frozen.forward(filler, "log_probs")
        for part in parts:
            batch = collate(part, packing=self.packing, pad_id=self.pad_id)
            looks = policy.forward(batch, "log_probs"), frozen.forward(batch, "log_probs")
            here, there = (_sequence_sums(outputs, batch) for outputs in looks)
            measured = preference_loss.mismatch_kl(here - there)
            total += torch.stack([measured.total, measured.count]).cpu()
        summed = policy.sum_over_ranks(total)
        return Mean(summed[0], summed[1])

    def counts(self, batch: Batch) -> Tensor:
        return count(batch.num_sequences)

    def loss(self, run: Run, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        outputs = run(batch, "log_probs")
        ratios = _sequence_sums(outputs, batch) - batch.extras["reference"]  # [sequences]
        baseline = batch.extras["baseline"]
        loss, metrics = preference_loss.kto(
            ratios,
            batch.extras["label"],
            baseline,
            self.beta,
            totals[0],
            self.desirable_weight,
            self.undesirable_weight,
        )
        metrics |= {"kto_loss": _share(loss, totals[0], ratios.numel()), "kl": mean_of(baseline.expand(ratios.shape))}
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class ProcessReward:
    """Process reward model: predict a label at the end of each reasoning step.

    Hard labels are classes, among the reward tokens or the whole vocabulary; soft labels are probabilities.
    """

    reward_token_ids: tuple[int, ...] = ()
    soft: bool = False
    aux_loss_coef: float = 0.0

    def prepare(self, batches: list[Batch], step: Step, policy: TrainBackend, frozen: Frozen | None) -> list[Batch]:
        return batches

    def counts(self, batch: Batch) -> Tensor:
        return count(batch.target_mask.sum())

    def loss(self, run: Run, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        outputs = run(batch, "target_logits")
        assert outputs.target_logits is not None
        labels = batch.extras["step_labels"][batch.target_mask]  # [rows, tokens] to [targets]
        ids = self.reward_token_ids or None
        if not self.soft:  # class numbers: indices into the reward tokens, or vocabulary ids
            labels = labels.long() if ids is None else torch.tensor(ids, device=labels.device)[labels.long()]
        everywhere = torch.ones_like(labels, dtype=torch.bool)
        loss, metrics = token_loss.prm_loss(outputs.target_logits, labels, everywhere, totals[0], ids)
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


def _hidden(outputs: Outputs) -> Tensor:
    assert outputs.hidden is not None
    return outputs.hidden


def _sequence_sums(outputs: Outputs, batch: Batch) -> Tensor:
    """Sum the log-probs of each response's target tokens, [sequences]."""
    assert outputs.log_probs is not None
    device = outputs.log_probs.device
    ids, mask = batch.sequence_ids.to(device), batch.target_mask.to(device)
    return sequence_sums(masked_log_probs(outputs.log_probs, mask), mask, ids, batch.num_sequences)


def _share(loss: Tensor, total: Tensor, number: int) -> Mean:
    """Turn a loss already divided by the step's total back into this micro-batch's sum and count, for the metrics."""
    return Mean(loss.detach().double() * total.to(loss.device), torch.tensor(float(number), dtype=torch.float64))


Collate = Callable[[Sequence[Any]], Batch]
