"""Flags of the supervised objectives, one section each; `training.build.make_objective` reads them."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, Range, flag

UP_TO_HALF = Range("between 0 and 0.5", lambda value: 0 <= value <= 0.5)


@dataclass(frozen=True, kw_only=True)
class PairwiseRewardFlags:
    """Reward loss"""

    loss: Literal["sigmoid", "logexp"] = flag(
        "sigmoid", "Loss on the reward difference: log-sigmoid, or the equivalent log-exp form."
    )
    margin_loss: bool = flag(False, "Subtract each row's `margin` inside the sigmoid.")
    compute_fp32_loss: bool = flag(False, "Accepted, but unused: rewards are always in fp32 before the loss.")


@dataclass(frozen=True, kw_only=True)
class DirectPreferenceFlags:
    """Preference loss"""

    beta: float = flag(0.1, "Strength of the regularisation towards the reference.", POSITIVE, essential=True)
    ipo: bool = flag(False, "Use the squared loss of IPO instead of the log-sigmoid.")
    ipo_length_average: bool = flag(False, "Use mean instead of summed log-probs in IPO, as TRL does.", needs="ipo")
    label_smoothing: float = flag(0.0, "cDPO: expected share of mislabelled pairs.", UP_TO_HALF)
    nll_loss_coef: float = flag(0.0, "Weight of the negative log-likelihood of the chosen response.", NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class UnpairedPreferenceFlags:
    """KTO loss"""

    beta: float = flag(0.01, "Strength of the regularisation towards the reference.", POSITIVE, essential=True)
    desirable_loss_weight: float = flag(1.0, "Weight of rows with label 1.", NOT_NEGATIVE)
    undesirable_loss_weight: float = flag(1.0, "Weight of rows with label 0.", NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class DistillationFlags:
    """Distillation"""

    teacher_model: str | None = flag(
        None,
        "Teacher model folder or hub name; must share the student's vocabulary.",
        required="./teacher",
        essential=True,
    )
    teacher_offload: bool = flag(False, "Keep the teacher on the CPU between forward passes.")
    kd_coef: float = flag(
        0.4, "Weight c of the distillation loss: (1 - c) x cross entropy + c x distillation.", SHARE, essential=True
    )
