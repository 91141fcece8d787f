"""Flags of the supervised objectives, one section each."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class PairwiseRewardFlags:
    """Reward loss"""

    loss: Literal["sigmoid", "logexp"] = flag("sigmoid", "log-sigmoid of the difference, or its log-exp form")
    margin_loss: bool = flag(False, "subtract each row's `margin` inside the sigmoid")
    compute_fp32_loss: bool = flag(False, "accepted; rewards are always in fp32 before the loss")


@dataclass(frozen=True, kw_only=True)
class DirectPreferenceFlags:
    """Preference loss"""

    beta: float = flag(0.1, "strength of the pull towards the reference")
    ipo: bool = flag(False, "IPO: a squared loss in place of the log-sigmoid")
    ipo_length_average: bool = flag(False, "IPO over mean log-probs, as TRL has it, in place of sums")
    label_smoothing: float = flag(0.0, "cDPO: the share of pairs believed to be mislabelled")
    nll_loss_coef: float = flag(0.0, "weight of the chosen response's negative log-likelihood")


@dataclass(frozen=True, kw_only=True)
class UnpairedPreferenceFlags:
    """KTO loss"""

    beta: float = flag(0.01, "strength of the pull towards the reference")
    desirable_loss_weight: float = flag(1.0, "weight of rows labelled 1")
    undesirable_loss_weight: float = flag(1.0, "weight of rows labelled 0")


@dataclass(frozen=True, kw_only=True)
class DistillationFlags:
    """Distillation"""

    teacher_model: str | None = flag(None, "teacher model folder or hub name; must share the student's vocabulary")
    teacher_offload: bool = flag(False, "keep the teacher on the CPU between its forward passes")
    kd_coef: float = flag(0.4, "share c of the teacher: (1 - c) x cross entropy + c x distillation")
