"""Flags of reinforcement learning: prompts, rollouts, rewards, advantages, KL, losses and the critic."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import flag
from openrlhf.config.sections.data import EvaluationFlags, split_names
from openrlhf.config.sections.training import OptimizerFlags

Estimator = Literal["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"]
GROUP_ESTIMATORS: frozenset[Estimator] = frozenset({"rloo", "reinforce_baseline", "group_norm", "dr_grpo"})
KLEstimator = Literal["k1", "k2", "k3"]
GENERATE_MAX_LEN = 1024
Correction = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True, kw_only=True)
class PromptFlags(EvaluationFlags):
    """Prompts"""

    prompt_data: str | None = flag(None, "comma list of prompt datasets: files, folders or hub names; name@dir")
    prompt_data_probs: str | None = flag(None, "comma list of mixing probabilities; none concatenates")
    prompt_split: str = flag("train", "split of the prompt datasets")
    input_key: str = flag("input", "field with the prompt: text or a message list")
    label_key: str | None = flag(None, "field handed to the reward function or agent as label")
    max_samples: int = flag(100_000_000, "rows taken of each dataset, and again after mixing")
    dataloader_num_workers: int = flag(0, "accepted; prompts are prepared before training starts")
    eval_temperature: float = flag(0.6, "sampling temperature of evaluation")
    eval_n_samples_per_prompt: int = flag(4, "samples per evaluation prompt")


@dataclass(frozen=True, kw_only=True)
class RolloutFlags:
    """Rollout"""

    rollout_batch_size: int = flag(1024, "prompts per rollout")
    n_samples_per_prompt: int = flag(1, "samples per prompt")
    micro_rollout_batch_size: int = flag(8, "samples per forward when log-probs, values and rewards are computed")
    num_episodes: int = flag(1, "passes over the prompts")
    prompt_max_len: int = flag(1024, "tokens of a prompt; used with --generate_max_len when --max_len is not given")
    generate_max_len: int = flag(GENERATE_MAX_LEN, "tokens of a response; used when --max_len is not given")
    max_len: int | None = flag(
        None, "tokens of prompt and response together; none is prompt_max_len + generate_max_len"
    )
    max_new_tokens: int | None = flag(None, "tokens of a response; none is what the context leaves")
    min_new_tokens: int = flag(1, "tokens that a response has at least")
    temperature: float = flag(1.0, "sampling temperature; policy and reference divide their logits by it too")
    top_p: float = flag(1.0, "sample from the smallest set of tokens with this probability")
    top_k: int = flag(-1, "sample from the k likeliest tokens; -1 from all")
    min_p: float = flag(0.0, "drop tokens less likely than this share of the likeliest")
    stop: tuple[str, ...] = flag((), "texts that end a response")
    replay: str | None = flag(None, "folder of recorded rollouts (RUN_DIR/rollouts) to train on instead of generating")
    vllm_generate_batch_size: int | None = flag(None, "prompts per generation call; none is rollout_batch_size")
    dynamic_filtering: bool = flag(False, "replace prompt groups whose mean score is outside the range (DAPO)")
    dynamic_filtering_reward_range: tuple[float, float] = flag((0.0, 1.0), "open interval for a group's mean score")
    use_dynamic_batch: bool = flag(False, "fill micro-batches by tokens rather than samples; turns packing on")
    train_max_tokens_per_gpu: int = flag(16192, "tokens per micro-batch in training with --use_dynamic_batch")
    rollout_max_tokens_per_gpu: int | None = flag(None, "the same for scoring; none is train_max_tokens_per_gpu")

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        return self.max_len if self.max_len is not None else self.prompt_max_len + self.generate_max_len

    @property
    def response_length(self) -> int | None:
        """Maximum number of tokens of a response; None means the rest of the context after the prompt."""
        if self.max_new_tokens is not None or self.max_len is not None:
            return self.max_new_tokens
        return self.generate_max_len

    @property
    def limits_on_tokens(self) -> tuple[str, ...]:
        """The flags in use that exclude tokens from the sampling distribution."""
        limits = {
            f"--top_p {self.top_p:g}": self.top_p < 1,
            f"--top_k {self.top_k}": self.top_k > 0,
            f"--min_p {self.min_p:g}": self.min_p > 0,
        }
        return tuple(flag for flag, limits_it in limits.items() if limits_it)

    @property
    def whole_log_probs(self) -> bool:
        """Whether engines sample from part of the distribution but return log-probs of all of it, as the trainer does.

        vLLM returns log-probs either before temperature and limits or after both, so this needs temperature 1.
        """
        return self.temperature == 1 and bool(self.limits_on_tokens or self.min_new_tokens > 1)

    @property
    def limits_on_log_probs(self) -> tuple[str, ...]:
        """The flags in use that make the engine's log-probs differ from the trainer's; a minimum length forbids EOS."""
        least = (f"--min_new_tokens {self.min_new_tokens}",) if self.min_new_tokens > 1 else ()
        return () if self.whole_log_probs else self.limits_on_tokens + least

    @property
    def scoring_token_budget(self) -> int:
        given = self.rollout_max_tokens_per_gpu
        return self.train_max_tokens_per_gpu if given is None else given


@dataclass(frozen=True, kw_only=True)
class AsyncTrainingFlags:
    """Overlap of rollout and training"""

    async_train: bool = flag(False, "generate the next rollouts while training on this one")
    async_queue_size: int = flag(1, "how many weight versions old a sample may be when trained; 0 is synchronous")
    partial_rollout: bool = flag(
        False, "pause generation for a weight sync and go on with the new weights (needs --async_train)"
    )


@dataclass(frozen=True, kw_only=True)
class RewardFlags:
    """Rewards and agents"""

    reward_pretrain: str | None = flag(
        None, "reward model, or several separated by commas; beside an agent it scores episodes that return no reward"
    )
    reward_weights: tuple[float, ...] = flag((), "weight of each reward model; none is 1 each")
    remote_rm_url: str | None = flag(None, "comma list of reward servers, or a .py file with reward_func")
    reward_api_key: str | None = flag(
        None, "key that the reward servers ask for (serve_rm --api_key); better given as OPENRLHF_RM_API_KEY"
    )
    agent_func_path: str | None = flag(None, ".py file with class AgentExecutor, or function run_agent or step")
    normalize_reward: bool = flag(False, "(reward - mean) / std with the values stored in the reward model")
    reward_clip_range: tuple[float, float] = flag((-10.0, 10.0), "clip on the shaped reward")
    overlong_buffer_len: float | None = flag(None, "tokens before the limit over which the overlong penalty grows")
    overlong_penalty_factor: float = flag(1.0, "largest overlong penalty")
    stop_properly_penalty_coef: float | None = flag(
        None, "factor in [0, 1] on the reward of truncated samples; a negative value is their reward"
    )
    step_rewards: bool = flag(
        False,
        "reward each turn of an agent, or each step that a process reward model judges, at its end rather than once "
        "at the last token",
    )
    prm_reduce: Literal["min", "mean", "last", "product"] = flag(
        "min", "how a process reward model's steps become one score, and without --step_rewards one reward"
    )
    reward_timeout: float = flag(180.0, "seconds that one call of a reward function, agent step or server may take")
    on_reward_error: Literal["stop", "skip"] = flag(
        "stop", "what a failing reward does to the run; skip drops the sample"
    )
    max_turns: int | None = flag(None, "turns after which an agent's episode ends")
    max_concurrent_episodes: int | None = flag(
        None,
        "episodes (samples) that run at a time; a prompt's begin together, so a smaller limit runs one prompt at a "
        "time; none is no limit",
    )
    max_episodes_per_engine: int | None = flag(
        None, "the same limit for each engine: this many times the number of engines run at a time; none is no limit"
    )

    @property
    def reward_models(self) -> tuple[str, ...]:
        return split_names(self.reward_pretrain)

    @property
    def scored_by_models(self) -> bool:
        """False if a function or a server gives the reward. An agent may leave the reward of an episode to models."""
        return bool(self.reward_models) and bool(self.agent_func_path or not self.remote_rm_url)

    @property
    def reward_servers(self) -> tuple[str, ...]:
        """Addresses of reward servers; empty if the reward is a Python file."""
        return () if self.reward_file else split_names(self.remote_rm_url)

    @property
    def reward_file(self) -> str | None:
        given = (self.remote_rm_url or "").strip()
        return given if given.endswith(".py") else None


@dataclass(frozen=True, kw_only=True)
class AdvantageFlags:
    """Advantages"""

    advantage_estimator: Estimator = flag(
        "gae", "gae is PPO, reinforce REINFORCE++, group_norm GRPO; reinforce_baseline suits verifiable rewards"
    )
    gamma: float = flag(1.0, "discount; only gae and reinforce use a value below 1")
    lambd: float = flag(1.0, "GAE lambda")
    no_advantage_std_norm: bool = flag(False, "centre advantages without dividing by their standard deviation")


@dataclass(frozen=True, kw_only=True)
class KLControlFlags:
    """KL to the reference"""

    init_kl_coef: float = flag(0.01, "weight of the KL; 0 runs without a reference model")
    kl_target: float | None = flag(None, "adapt the weight so that the KL stays near this")
    kl_horizon: int = flag(10_000, "samples over which the adaptive weight moves")
    kl_estimator: KLEstimator = flag("k1", "k1 suits the KL in the reward, k2 and k3 the KL in the loss")
    use_kl_loss: bool = flag(False, "KL as a loss term in place of a reward term")
    kl_unbiased_gradient: bool = flag(False, "with --use_kl_loss: the estimator's value with the exact KL's gradient")


@dataclass(frozen=True, kw_only=True)
class PolicyLossFlags:
    """Policy and value loss"""

    policy_loss_type: Literal["ppo", "gspo"] = flag("ppo", "token ratios, or one ratio per sequence")
    eps_clip: float = flag(0.2, "clip range of the ratio, both sides")
    eps_clip_low_high: tuple[float, float] | None = flag(None, "clip range below and above; none is eps_clip twice")
    dual_clip: float | None = flag(None, "above 1: bound on the loss of bad actions made much likelier")
    loss_agg_mode: Literal["token-mean", "seq-mean", "constant"] | None = flag(
        None, "mean over tokens, over sequences, or a constant length; none is what the estimator's paper uses"
    )
    value_clip: float = flag(0.5, "clip range of the critic's change")
    entropy_loss_coef: float | None = flag(None, "weight of an entropy bonus; 0 only logs the entropy")
    enable_vllm_is_correction: bool | None = flag(
        None,
        "importance correction: weigh each token by how likely trainer and engine find it; default: on with "
        "--async_train, whose samples are old, else off; false switches it off",
    )
    vllm_is_correction_type: Correction = flag("tis", "clamp the weight, drop the token, or drop the sequence")
    vllm_is_truncated_threshold: tuple[float, ...] = flag(
        (0.5, 5.0), "interval of the weight; one value is its upper end"
    )
    freezing_actor_steps: int = flag(-1, "train only the critic for the first N steps")
    enable_ema: bool = flag(False, "keep an average of the policy, and save that")
    ema_beta: float = flag(0.992, "decay of the average")

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)

    @property
    def correction_range(self) -> tuple[float, float]:
        low, high = (0.0, *self.vllm_is_truncated_threshold)[-2:]
        return low, high


@dataclass(frozen=True, kw_only=True)
class PolicyOptimizerFlags(OptimizerFlags):
    """Optimizer"""

    actor_learning_rate: float = flag(1e-6, "peak learning rate of the policy")
    critic_learning_rate: float = flag(9e-6, "peak learning rate of the critic")
    critic_optim: Literal["adam", "muon"] | None = flag(
        None, "the critic's --optim; this and the next: none is as the policy"
    )
    critic_lr_scheduler: str | None = flag(None, "the critic's --lr_scheduler")
    critic_lr_warmup_ratio: float | None = flag(None, "the critic's --lr_warmup_ratio")
    critic_min_lr_ratio: float | None = flag(None, "the critic's --min_lr_ratio")
    critic_l2: float | None = flag(None, "the critic's --l2")
    critic_adam_betas: tuple[float, float] | None = flag(None, "the critic's --adam_betas")
    critic_adam_eps: float | None = flag(None, "the critic's --adam_eps")
    critic_max_norm: float | None = flag(None, "the critic's --max_norm")
    critic_muon_lr: float | None = flag(None, "the critic's --muon_lr")
    critic_muon_momentum: float | None = flag(None, "the critic's --muon_momentum")
    critic_muon_ns_steps: int | None = flag(None, "the critic's --muon_ns_steps")
    critic_muon_nesterov: bool | None = flag(None, "the critic's --muon_nesterov")


@dataclass(frozen=True, kw_only=True)
class CriticFlags:
    """Critic and other models"""

    critic_pretrain: str | None = flag(None, "the critic's start; none is the first reward model, else --pretrain")
    save_value_network: bool = flag(False, "save the critic to {save_path}_critic")
    ref_pretrain: str | None = flag(None, "frozen reference model; none takes --pretrain")
    ref_reward_offload: bool = flag(False, "keep reference and reward model on the CPU between their forward passes")
    best_metric_key: str = flag(
        "", "evaluation metric of the best checkpoint; default: the first *_pass1, else the first *_reward; none is off"
    )
