"""The six supervised objectives: SFT, distillation, pairwise reward, DPO, KTO and process reward.

Each objective requests outputs from the network and applies a loss of `algo` to them. For every optimizer step, `Fit`
collates the rows and calls `prepare`, which may run a frozen model on the batches; the backend then calls `loss` for
each micro-batch. Results of `prepare` are stored in fields of a subclass of the batch:

    rows -> collate -> Batch -> prepare -> e.g. ReferencedPairs -> loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from openrlhf.algo import preference_loss, token_loss
from openrlhf.algo.expert_balance import balance_loss
from openrlhf.algo.reduce import Mean, Metrics, masked_log_probs, mean_of, moments, sequence_means, sequence_sums
from openrlhf.config.sections.objectives import (
    DirectPreferenceFlags,
    DistillationFlags,
    PairwiseRewardFlags,
    UnpairedPreferenceFlags,
)
from openrlhf.data.collate import Layout
from openrlhf.data.preference import mismatch_rows
from openrlhf.models.forward import DistillationTerms, HiddenStates, LogProbs, Outputs, Scores, TargetLogits, Teacher
from openrlhf.training.backend import B, Frozen, Objective, Run, StepTotals, TrainBackend
from openrlhf.training.order import micro_batches as cut
from openrlhf.training.order import num_micro_batches
from openrlhf.types import Batch, LabelledBatch, LabelledRow, PairBatch, StepBatch

AUX_ON = 1e-8  # coefficients up to this value disable their term
SCORES = "scores"  # metric with the moments of all scores of a reward model
Row = TypeVar("Row", contravariant=True)
Collated = TypeVar("Collated", bound=Batch, contravariant=True)
Prepared = TypeVar("Prepared", bound=Batch)


@dataclass(frozen=True)
class Step(Generic[Row]):
    """All rows of one optimizer step, and the indices of the rows of this rank."""

    rows: Sequence[Row]
    mine: Sequence[int]  # indices into `rows`
    micro_size: int  # rows per micro-batch


class SupervisedObjective(Objective[Prepared], Protocol[Row, Collated, Prepared]):
    """An objective of the supervised loop, for one kind of row."""

    def prepare(self, batches: list[Collated], step: Step[Row], policy: TrainBackend) -> list[Prepared]:
        """Return the batches to train on, with the outputs of a frozen model if the objective needs one."""
        ...


class NeedsNoModel:
    """Mixin for objectives without a frozen model, which train on the collated batches directly."""

    def prepare(self, batches: list[B], step: Step[object], policy: TrainBackend) -> list[B]:
        return batches


@dataclass(frozen=True, kw_only=True)
class TaughtBatch(Batch):
    """Texts with the hidden states of a teacher."""

    teacher_hidden: Tensor  # [targets, hidden]


@dataclass(frozen=True, kw_only=True)
class ReferencedPairs(PairBatch):
    """Pairs with the log-prob of each response under the reference."""

    reference: Tensor  # [2 x pairs]


@dataclass(frozen=True, kw_only=True)
class ReferencedLabels(LabelledBatch):
    """Labelled responses with their log-probs under the reference, and the baseline of the whole step."""

    reference: Tensor  # [sequences]
    baseline: Tensor  # []


def add_aux(
    loss: Tensor, metrics: Metrics, outputs: Outputs, coef: float, totals: StepTotals
) -> tuple[Tensor, Metrics]:
    """Add this micro-batch's share of the load-balancing loss of a mixture of experts."""
    if outputs.expert_counts is None or outputs.expert_probabilities is None:
        return loss, metrics
    counts = outputs.expert_counts if totals.expert_counts is None else totals.expert_counts
    share = balance_loss(outputs.expert_probabilities, counts.to(loss), totals.tokens.to(loss))
    # The shares of all micro-batches add up to the loss; the metric is its mean over steps, weighted by their tokens.
    tokens = outputs.expert_probabilities.detach().sum(dtype=torch.float64)  # a token's probabilities add up to 1
    whole = Mean(share.detach().double() * totals.tokens.to(share.device), tokens)
    return loss + coef * share, {**metrics, "aux_loss": whole}


@dataclass(frozen=True)
class SFT(NeedsNoModel):
    """Mean negative log-likelihood of the target tokens."""

    aux_loss_coef: float = 0.0

    def loss(self, run: Run, batch: Batch, totals: StepTotals) -> tuple[Tensor, Metrics]:
        outputs = run(batch, LogProbs)
        loss, metrics = token_loss.sft_loss(outputs.log_probs, batch.target_mask, totals.targets)
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class Distillation:
    """Weighted mean of two cross-entropies: against the data, and against a teacher's distribution."""

    flags: DistillationFlags
    teacher: Frozen
    aux_loss_coef: float = 0.0

    def prepare(self, batches: list[Batch], step: Step[object], policy: TrainBackend) -> list[TaughtBatch]:
        with self.teacher.on_device():
            found = [self.teacher.forward(batch, HiddenStates).hidden for batch in batches]
        return [batch.as_kind(TaughtBatch, teacher_hidden=hidden) for batch, hidden in zip(batches, found, strict=True)]

    def loss(self, run: Run, batch: TaughtBatch, totals: StepTotals) -> tuple[Tensor, Metrics]:
        teacher = Teacher(batch.teacher_hidden, self.teacher.network.vocabulary_head)
        outputs = run(batch, DistillationTerms, teacher=teacher)
        loss, metrics = token_loss.kd_loss(
            outputs.log_probs, outputs.cross, batch.target_mask, totals.targets, self.flags.kd_coef
        )
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class PairwiseReward(NeedsNoModel):
    """Reward model on pairs: one score per response, which should be higher for the preferred response."""

    flags: PairwiseRewardFlags
    aux_loss_coef: float = 0.0

    def loss(self, run: Run, batch: PairBatch, totals: StepTotals) -> tuple[Tensor, Metrics]:
        outputs = run(batch, Scores)
        chosen, rejected = outputs.scores.chunk(2)  # [2 x pairs] to [pairs] each
        pairs = totals.sequences / 2
        margin = batch.margin if self.flags.margin_loss else None
        loss, metrics = preference_loss.REWARD_LOSSES[self.flags.loss](chosen, rejected, pairs, margin)
        metrics["loss"] = _share(loss, pairs, chosen.numel())
        metrics[SCORES] = moments(outputs.scores)
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class DirectPreference:
    """DPO, cDPO or IPO on pairs; `prepare` computes the log-probs of the reference."""

    flags: DirectPreferenceFlags
    reference: Frozen
    aux_loss_coef: float = 0.0

    def prepare(self, batches: list[PairBatch], step: Step[object], policy: TrainBackend) -> list[ReferencedPairs]:
        with self.reference.on_device():
            found = [self._per_response(self.reference.forward(batch, LogProbs), batch) for batch in batches]
        return [batch.as_kind(ReferencedPairs, reference=own) for batch, own in zip(batches, found, strict=True)]

    def loss(self, run: Run, batch: ReferencedPairs, totals: StepTotals) -> tuple[Tensor, Metrics]:
        outputs = run(batch, LogProbs)
        # Log-ratios of policy to reference, [2 x pairs] to [pairs] each.
        chosen, rejected = (self._per_response(outputs, batch) - batch.reference).chunk(2)
        flags, pairs = self.flags, totals.sequences / 2
        if flags.ipo:
            loss, metrics = preference_loss.ipo(chosen, rejected, flags.beta, pairs)
        else:
            loss, metrics = preference_loss.dpo(chosen, rejected, flags.beta, pairs, flags.label_smoothing)
        metrics["loss"] = _share(loss, pairs, chosen.numel())
        if flags.nll_loss_coef > AUX_ON:
            mask = batch.target_mask & (batch.sequence_ids < batch.num_sequences // 2)  # chosen responses only
            nll, measured = preference_loss.chosen_nll(outputs.log_probs, mask, pairs, batch.sequence_ids)
            loss, metrics = loss + flags.nll_loss_coef * nll, metrics | {"nll_loss": measured["nll"]}
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)

    def _per_response(self, outputs: LogProbs, batch: Batch) -> Tensor:
        """Return the log-prob of each response, [sequences]: a sum over tokens, or a mean with --ipo_length_average."""
        return _sequence_sums(outputs, batch, average=self.flags.ipo and self.flags.ipo_length_average)


@dataclass(frozen=True)
class UnpairedPreference:
    """KTO: compare each response with a baseline, which is the same for the whole step."""

    flags: UnpairedPreferenceFlags
    reference: Frozen
    layout: Layout  # layout of the mismatched pairs, the same as that of the batches
    max_len: int
    aux_loss_coef: float = 0.0

    def prepare(
        self, batches: list[LabelledBatch], step: Step[LabelledRow], policy: TrainBackend
    ) -> list[ReferencedLabels]:
        with self.reference.on_device():
            baseline = self._baseline(step, policy)
            return [
                batch.as_kind(
                    ReferencedLabels,
                    reference=_sequence_sums(self.reference.forward(batch, LogProbs), batch),
                    baseline=baseline,
                )
                for batch in batches
            ]

    def _baseline(self, step: Step[LabelledRow], policy: TrainBackend) -> Tensor:
        """Return the mean log-ratio of each prompt with the next row's response, over the step and all ranks."""
        pairs = mismatch_rows(step.rows, self.max_len)
        total = torch.zeros(2, dtype=torch.float64)
        parts = cut([pairs[place] for place in step.mine], step.micro_size)
        rounds = num_micro_batches(len(step.rows), policy.data_parallel_size, step.micro_size)
        for _ in range(rounds - len(parts)):  # a sharded model runs on all ranks together
            filler = self.layout.batch(pairs[:1])
            policy.forward(filler, LogProbs), self.reference.forward(filler, LogProbs)
        for part in parts:
            batch = self.layout.batch(part)
            own, reference = (
                _sequence_sums(model.forward(batch, LogProbs), batch) for model in (policy, self.reference)
            )
            measured = mean_of(own - reference)
            total += torch.stack([measured.total, measured.count]).cpu()
        return preference_loss.kto_baseline(Mean(*policy.sum_over_ranks(total)))

    def loss(self, run: Run, batch: ReferencedLabels, totals: StepTotals) -> tuple[Tensor, Metrics]:
        outputs = run(batch, LogProbs)
        ratios = _sequence_sums(outputs, batch) - batch.reference  # [sequences]
        weights = self.flags.desirable_loss_weight, self.flags.undesirable_loss_weight
        loss, metrics = preference_loss.kto(
            ratios, batch.label, batch.baseline, self.flags.beta, totals.sequences, *weights
        )
        metrics["kto_loss"] = _share(loss, totals.sequences, ratios.numel())
        metrics["kl"] = mean_of(batch.baseline.expand(ratios.shape))
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class ProcessReward(NeedsNoModel):
    """Process reward model: predict a label at the end of each reasoning step.

    Hard labels are reward tokens or, without reward tokens, any tokens; soft labels are probabilities.
    """

    reward_token_ids: tuple[int, ...] = ()
    soft: bool = False
    aux_loss_coef: float = 0.0

    def loss(self, run: Run, batch: StepBatch, totals: StepTotals) -> tuple[Tensor, Metrics]:
        outputs = run(batch, TargetLogits)
        labels = batch.step_labels.flatten()[batch.places.targets]  # [rows, tokens] to [targets]
        ids = self.reward_token_ids or None
        if not self.soft:  # labels are indices into the reward tokens, or vocabulary ids
            labels = labels.long() if ids is None else torch.tensor(ids, device=labels.device)[labels.long()]
        everywhere = torch.ones_like(labels, dtype=torch.bool)
        loss, metrics = token_loss.prm_loss(outputs.logits, labels, everywhere, totals.targets, ids)
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


def _sequence_sums(outputs: LogProbs, batch: Batch, *, average: bool = False) -> Tensor:
    """Sum or average the log-probs of each response's target tokens, [sequences], on the device of the outputs."""
    device = outputs.log_probs.device
    ids, mask = batch.sequence_ids.to(device), batch.target_mask.to(device)
    per_sequence = sequence_means if average else sequence_sums
    return per_sequence(masked_log_probs(outputs.log_probs, mask), mask, ids, batch.num_sequences)


def _share(loss: Tensor, total: Tensor, number: int) -> Mean:
    """Return the sum and count of a micro-batch as a metric, from a loss already divided by the step's total."""
    return Mean(loss.detach().double() * total.to(loss.device), torch.tensor(float(number), dtype=torch.float64))
