"""Flags of the reinforcement-learning algorithm: advantages, KL, losses, optimizers and the critic.

Losses and workers receive these sections unchanged, like those of `rl.py`.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from openrlhf.config.flags import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range, flag
from openrlhf.config.sections.training import OptimizerFlags

Estimator = Literal["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"]
GROUP_ESTIMATORS: frozenset[Estimator] = frozenset({"rloo", "reinforce_baseline", "group_norm", "dr_grpo"})
KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token-mean", "seq-mean", "constant"]
Correction = Literal["tis", "icepop", "seq-mask-tis"]

ABOVE_ONE = Range("above 1", lambda value: value > 1)


@dataclass(frozen=True, kw_only=True)
class AdvantageFlags:
    """Advantages"""

    advantage_estimator: Estimator = flag(
        "gae",
        "Advantage estimator: gae is PPO, reinforce is REINFORCE++, group_norm is GRPO; reinforce_baseline suits "
        "verifiable rewards.",
        essential=True,
    )
    gamma: float = flag(1.0, "Discount factor; only gae and reinforce use a value below 1.", SHARE)
    lambd: float = flag(1.0, "GAE lambda.", SHARE)
    no_advantage_std_norm: bool = flag(False, "Centre advantages without dividing by their standard deviation.")


@dataclass(frozen=True, kw_only=True)
class KLControlFlags:
    """KL to the reference"""

    init_kl_coef: float = flag(
        0.01, "Weight of the KL term; with 0, no reference model is loaded.", NOT_NEGATIVE, essential=True
    )
    kl_target: float | None = flag(None, "Adapt the weight so that the KL stays near this value.", POSITIVE)
    kl_horizon: int = flag(10_000, "Number of samples over which the weight adapts.", POSITIVE, needs="kl_target")
    kl_estimator: KLEstimator = flag(
        "k1", "KL estimator; use k1 with a KL term in the reward, k2 or k3 with one in the loss."
    )
    use_kl_loss: bool = flag(False, "Add the KL term to the loss instead of the reward.")
    kl_unbiased_gradient: bool = flag(
        False, "Give the KL loss an unbiased gradient of the KL; its value does not change.", needs="use_kl_loss"
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLossFlags:
    """Policy and value loss"""

    policy_loss_type: Literal["ppo", "gspo"] = flag("ppo", "Compute the ratio per token (ppo) or per sequence (gspo).")
    eps_clip: float = flag(0.2, "Clip the ratio to [1 - eps, 1 + eps].", NOT_NEGATIVE)
    eps_clip_low_high: tuple[float, float] | None = flag(
        None, "Clip range below and above 1 (default: --eps_clip for both)."
    )
    dual_clip: float | None = flag(
        None,
        "Limit the loss of actions with a negative advantage A to this value times |A| (dual-clip PPO).",
        ABOVE_ONE,
    )
    loss_agg_mode: Aggregation | None = flag(
        None,
        "Average the loss over tokens, sequences or a constant length (default: constant for dr_grpo, else "
        "token-mean).",
    )
    value_clip: float = flag(0.5, "Clip range for changes in the critic's values.", POSITIVE)
    entropy_loss_coef: float | None = flag(None, "Weight of the entropy bonus; 0 only logs the entropy.", NOT_NEGATIVE)
    enable_vllm_is_correction: bool | None = flag(
        None,
        "Importance correction: weight each token by the ratio of its probability under the trainer to that under the "
        "engine (default: on with --async_train, whose samples are stale; otherwise off).",
    )
    vllm_is_correction_type: Correction = flag(
        "tis",
        "Out-of-range importance weights: clamp (tis), drop the token (icepop) or the sequence (seq-mask-tis).",
    )
    vllm_is_truncated_threshold: tuple[float, ...] = flag(
        (0.5, 5.0), "Lower and upper bound of the importance weight; a single value is the upper bound."
    )
    freezing_actor_steps: int = flag(-1, "Train only the critic in the first N steps.")
    enable_ema: bool = flag(
        False, "Save an exponential moving average of the policy's weights instead of the final weights."
    )
    ema_beta: float = flag(0.992, "Decay of the moving average.", BELOW_ONE, needs="enable_ema")

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)

    @property
    def correction_range(self) -> tuple[float, float]:
        low, high = (0.0, *self.vllm_is_truncated_threshold)[-2:]
        return low, high

    @property
    def aggregation(self) -> Aggregation:
        """The aggregation mode in effect; GSPO always averages over sequences."""
        return "seq-mean" if self.policy_loss_type == "gspo" else self.loss_agg_mode or "token-mean"


@dataclass(frozen=True, kw_only=True)
class PolicyOptimizerFlags(OptimizerFlags):
    """Optimizer"""

    actor_learning_rate: float = flag(1e-6, "Peak learning rate of the policy.", NOT_NEGATIVE, essential=True)
    critic_learning_rate: float = flag(9e-6, "Peak learning rate of the critic.", NOT_NEGATIVE)
    # One flag with the prefix `critic_` for each flag of OptimizerFlags.
    critic_optim: Literal["adam", "muon"] | None = flag(None, "Critic optimizer (default: same as the policy).")
    critic_lr_scheduler: str | None = flag(None, "Critic --lr_scheduler (default: same as the policy).")
    critic_lr_warmup_ratio: float | None = flag(None, "Critic --lr_warmup_ratio (default: same as the policy).", SHARE)
    critic_min_lr_ratio: float | None = flag(None, "Critic --min_lr_ratio (default: same as the policy).", SHARE)
    critic_l2: float | None = flag(None, "Critic --l2 (default: same as the policy).", NOT_NEGATIVE)
    critic_adam_betas: tuple[float, float] | None = flag(
        None, "Critic --adam_betas (default: same as the policy).", BELOW_ONE
    )
    critic_adam_eps: float | None = flag(None, "Critic --adam_eps (default: same as the policy).", POSITIVE)
    critic_max_norm: float | None = flag(None, "Critic --max_norm (default: same as the policy).", NOT_NEGATIVE)
    critic_muon_lr: float | None = flag(None, "Critic --muon_lr (default: same as the policy).", NOT_NEGATIVE)
    critic_muon_momentum: float | None = flag(None, "Critic --muon_momentum (default: same as the policy).", BELOW_ONE)
    critic_muon_ns_steps: int | None = flag(None, "Critic --muon_ns_steps (default: same as the policy).", POSITIVE)
    critic_muon_nesterov: bool | None = flag(None, "Critic --muon_nesterov (default: same as the policy).")

    @property
    def critic(self) -> OptimizerFlags:
        """The critic's optimizer flags: the policy's, overridden by the critic_* flags that are set."""
        own = {item.name: getattr(self, f"critic_{item.name}") for item in fields(OptimizerFlags)}
        return replace(self, **{name: value for name, value in own.items() if value not in (None, "")})


@dataclass(frozen=True, kw_only=True)
class CriticFlags:
    """Critic and other models"""

    critic_pretrain: str | None = flag(None, "Initial critic (default: the first reward model, else --pretrain).")
    save_value_network: bool = flag(False, "Save the critic to {save_path}_critic.")
    ref_pretrain: str | None = flag(None, "Frozen reference model (default: --pretrain).")
    ref_reward_offload: bool = flag(False, "Keep reference and reward models on the CPU between forward passes.")
    best_metric_key: str = flag(
        "",
        "Evaluation metric that selects the best checkpoint; none disables this (default: the first *_pass1, "
        "else the first *_reward).",
        needs="eval_dataset eval_size",
    )
