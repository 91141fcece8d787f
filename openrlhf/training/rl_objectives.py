"""The objectives of the policy and the critic in RL, which apply the losses of `algo`. Workers receive them pickled.

Both train on a PolicyBatch with advantages, returns, old values and log-probs, all [rows, tokens]. If old log-probs are
missing, the current ones are used, which is exact for a single on-policy step. `rl.models` passes the objectives to
`TrainBackend.forward_backward`, as `Fit` does with those in `objectives.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from openrlhf.algo.kl import kl_loss
from openrlhf.algo.policy_loss import entropy_loss, policy_loss
from openrlhf.algo.reduce import Mean, Metrics, mean_of
from openrlhf.algo.value_loss import value_loss
from openrlhf.config.sections.algorithm import PolicyLossFlags
from openrlhf.models.forward import LogProbs, LogProbsAndEntropy, Values
from openrlhf.training.backend import Run, StepTotals, temperature_of
from openrlhf.training.objectives import add_aux
from openrlhf.types import PolicyBatch


@dataclass(frozen=True)
class PolicyObjective:
    """Clipped policy loss with optional terms: KL to the reference, entropy and load balancing of experts."""

    settings: PolicyLossFlags
    temperature: float = 1.0
    kl_coef: float = 0.0  # 0 if the KL penalty is part of the reward
    kl_estimator: str = "k2"  # a key of KL_ESTIMATORS
    kl_unbiased_gradient: bool = False  # see `kl_loss`
    entropy_coef: float | None = None  # None: do not compute the entropy
    aux_loss_coef: float = 0.0
    constant_length: int = 1  # tokens per sequence in the denominator of "constant" aggregation

    def has_signal(self, batch: PolicyBatch) -> bool:
        """Return whether a batch has anything to learn: equal rewards give advantages of zero."""
        always = self.kl_coef or self.entropy_coef or self.aux_loss_coef
        return bool(always) or bool(batch.advantages[batch.target_mask].any())

    def loss(self, run: Run, batch: PolicyBatch, totals: StepTotals) -> tuple[Tensor, Metrics]:
        temperature, mask, rows = temperature_of(batch, self.temperature), batch.target_mask, batch.sequence_ids
        kind = LogProbs if self.entropy_coef is None else LogProbsAndEntropy
        outputs = run(batch, kind, temperature=temperature)
        log_probs = outputs.log_probs  # [rows, tokens]
        old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        mode = self.settings.aggregation
        sequences = totals.trained_sequences
        constant = sequences * self.constant_length
        denominator = {"token-mean": totals.targets, "seq-mean": sequences, "constant": constant}[mode]
        loss, metrics = policy_loss(
            log_probs, old_log_probs, batch.advantages, mask, denominator, self.settings, batch.rollout_log_probs, rows
        )
        metrics["ppo_clip_ratio"] = metrics.pop("clip_ratio")  # the name that dashboards use
        metrics["policy_loss"] = whole_loss(loss, totals)
        if self.kl_coef > 0:
            if batch.reference_log_probs is None:
                raise ValueError("the KL loss needs reference log-probs, but the batch has none")
            old = old_log_probs if self.kl_unbiased_gradient else None
            term, measured = kl_loss(
                log_probs, batch.reference_log_probs, mask, denominator, self.kl_estimator, mode, rows, old
            )
            loss, metrics = loss + self.kl_coef * term, metrics | measured
        if self.entropy_coef is not None and isinstance(outputs, LogProbsAndEntropy):
            term, measured = entropy_loss(outputs.entropy, mask, denominator, mode, rows)
            loss, metrics = loss + self.entropy_coef * term, metrics | measured
        return add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)


@dataclass(frozen=True)
class ValueObjective:
    """Clipped value loss over the action tokens of the step."""

    value_clip: float
    aux_loss_coef: float = 0.0

    def loss(self, run: Run, batch: PolicyBatch, totals: StepTotals) -> tuple[Tensor, Metrics]:
        if batch.old_values is None or batch.returns is None:
            raise ValueError("the value loss needs old values and returns, but the batch lacks them")
        outputs = run(batch, Values)
        loss, metrics = value_loss(
            outputs.values, batch.old_values, batch.returns, batch.target_mask, totals.targets, self.value_clip
        )
        metrics["critic_loss"] = whole_loss(loss, totals)
        loss, metrics = add_aux(loss, metrics, outputs, self.aux_loss_coef, totals)
        return loss, {"critic_aux_loss" if name == "aux_loss" else name: mean for name, mean in metrics.items()}


def whole_loss(share: Tensor, totals: StepTotals) -> Mean:
    """Return the step's loss as a metric.

    Multiplied by the number of micro-batches, the losses of micro-batches average to the loss of the step.
    """
    return mean_of(share.detach().double().reshape(1) * totals.micro_batches.to(share.device))
