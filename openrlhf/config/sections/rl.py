"""Flags of reinforcement learning: prompts, rollouts, rewards, advantages, KL, losses and the critic.

The RL loop, its losses and its workers receive these sections unchanged; they are frozen and picklable. Values derived
from one section are properties of that section; values derived from several are functions in `config/runtime.py`.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from openrlhf.config.flags import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_OR_MINUS_ONE,
    POSITIVE_SHARE,
    SHARE,
    Range,
    flag,
)
from openrlhf.config.in_memory import is_in_memory
from openrlhf.config.sections.data import EvaluationFlags, split_names
from openrlhf.config.sections.training import OptimizerFlags

Estimator = Literal["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"]
GROUP_ESTIMATORS: frozenset[Estimator] = frozenset({"rloo", "reinforce_baseline", "group_norm", "dr_grpo"})
KLEstimator = Literal["k1", "k2", "k3"]
GENERATE_MAX_LEN = 1024
Aggregation = Literal["token-mean", "seq-mean", "constant"]
Correction = Literal["tis", "icepop", "seq-mask-tis"]

EXPLORING = Range(
    "above 0: at 0 the most likely token is always chosen, so nothing is explored", lambda value: value > 0
)
ABOVE_ONE = Range("above 1", lambda value: value > 1)
AT_MOST_ONE = Range("at most 1", lambda value: value <= 1)


@dataclass(frozen=True, kw_only=True)
class PromptFlags(EvaluationFlags):
    """Prompts"""

    prompt_data: str | None = flag(
        None,
        "Comma-separated prompt datasets: files, folders or hub names; name@dir selects a subfolder.",
        required="./prompts.jsonl",
        essential=True,
    )
    prompt_data_probs: str | None = flag(
        None, "Comma-separated mixing probabilities (default: concatenate the datasets)."
    )
    prompt_split: str = flag("train", "Split of the prompt datasets.")
    dataset_revision: str | None = flag(
        None, "Comma-separated commit hashes, tags or branches, one for each hub name in --prompt_data."
    )
    input_key: str = flag("input", "Field with the prompt: text or a list of messages.", essential=True)
    label_key: str | None = flag(None, "Field passed to the reward function or agent as the label.", essential=True)
    max_samples: int = flag(100_000_000, "Maximum rows per dataset, and in total after mixing.", POSITIVE)
    dataloader_num_workers: int = flag(0, "Accepted, but unused: prompts are prepared before training.", NOT_NEGATIVE)
    eval_temperature: float = flag(0.6, "Sampling temperature of evaluation.", NOT_NEGATIVE, needs="eval_dataset")
    eval_n_samples_per_prompt: int = flag(4, "Samples per evaluation prompt.", POSITIVE, needs="eval_dataset")


@dataclass(frozen=True, kw_only=True)
class RolloutFlags:
    """Rollout"""

    rollout_batch_size: int = flag(1024, "Prompts per rollout.", POSITIVE, essential=True)
    n_samples_per_prompt: int = flag(1, "Samples per prompt.", POSITIVE, essential=True)
    micro_rollout_batch_size: int = flag(8, "Samples per forward pass for log-probs, values and rewards.", POSITIVE)
    num_episodes: int = flag(1, "Passes over the prompts.", POSITIVE)
    prompt_max_len: int = flag(1024, "Maximum tokens per prompt; unused if --max_len is given.", POSITIVE)
    generate_max_len: int = flag(GENERATE_MAX_LEN, "Maximum tokens per response; see also --max_len.", POSITIVE)
    max_len: int | None = flag(
        None,
        "Maximum tokens in prompt and response together (default: --prompt_max_len + --generate_max_len).",
        POSITIVE,
    )
    max_new_tokens: int | None = flag(
        None, "Maximum tokens per response (default: the rest of the context).", POSITIVE, essential=True
    )
    min_new_tokens: int = flag(1, "Minimum tokens per response.", POSITIVE)
    temperature: float = flag(
        1.0, "Sampling temperature; policy and reference also divide their logits by it.", EXPLORING
    )
    top_p: float = flag(1.0, "Sample from the smallest set of tokens with this total probability.", POSITIVE_SHARE)
    top_k: int = flag(-1, "Sample from the k most likely tokens; -1 means all of them.", POSITIVE_OR_MINUS_ONE)
    min_p: float = flag(0.0, "Exclude tokens below this fraction of the highest token probability.", SHARE)
    stop: tuple[str, ...] = flag((), "Strings that end a response.")
    replay: str | None = flag(None, "Folder of recorded rollouts (RUN_DIR/rollouts) to train on instead of generating.")
    rollout_record_gib: float = flag(
        10.0,
        "Stop recording rollouts when RUN_DIR/rollouts reaches this many GiB.",
        POSITIVE,
        needs="rollout_record_share",
    )
    rollout_record_share: float = flag(1.0, "Share of the groups to record in RUN_DIR/rollouts; 0 records none.", SHARE)
    vllm_generate_batch_size: int | None = flag(
        None, "Prompts per generation call (default: --rollout_batch_size).", POSITIVE
    )
    dynamic_filtering: bool = flag(
        False, "Replace groups whose mean score is outside --dynamic_filtering_reward_range (DAPO)."
    )
    dynamic_filtering_reward_range: tuple[float, float] = flag(
        (0.0, 1.0), "Lower and upper bound of a group's mean score, both exclusive.", needs="dynamic_filtering"
    )
    use_dynamic_batch: bool = flag(False, "Limit micro-batches by tokens instead of samples; turns packing on.")
    train_max_tokens_per_gpu: int = flag(
        16192, "Maximum tokens per training micro-batch.", POSITIVE, needs="use_dynamic_batch"
    )
    rollout_max_tokens_per_gpu: int | None = flag(
        None, "Maximum tokens per scoring micro-batch (default: as for training).", POSITIVE, needs="use_dynamic_batch"
    )

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in prompt and response together."""
        return self.max_len if self.max_len is not None else self.prompt_max_len + self.generate_max_len

    @property
    def response_length(self) -> int | None:
        """Maximum number of tokens in a response; None means the rest of the context after the prompt."""
        if self.max_new_tokens is not None or self.max_len is not None:
            return self.max_new_tokens
        return self.generate_max_len

    @property
    def longest_response(self) -> int:
        """Maximum number of tokens in a response to any prompt."""
        return self.response_length or self.context_length

    @property
    def samples_per_rollout(self) -> int:
        """Number of samples in a full rollout."""
        return self.rollout_batch_size * self.n_samples_per_prompt

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
        """True if engines sample from a truncated distribution but return log-probs of the full one, like the trainer.

        vLLM returns log-probs either before temperature and truncation or after both, so this needs temperature 1.
        """
        return self.temperature == 1 and bool(self.limits_on_tokens or self.min_new_tokens > 1)

    @property
    def limits_on_log_probs(self) -> tuple[str, ...]:
        """The flags in use that make the engine's log-probs differ from the trainer's.

        A minimum length is one of them, because it masks EOS.
        """
        least = (f"--min_new_tokens {self.min_new_tokens}",) if self.min_new_tokens > 1 else ()
        return () if self.whole_log_probs else self.limits_on_tokens + least

    @property
    def scoring_token_budget(self) -> int:
        """Maximum tokens per scoring micro-batch, with --use_dynamic_batch."""
        given = self.rollout_max_tokens_per_gpu
        return self.train_max_tokens_per_gpu if given is None else given


@dataclass(frozen=True, kw_only=True)
class AsyncTrainingFlags:
    """Overlap of rollout and training"""

    async_train: bool = flag(False, "Generate the next rollouts while training on the current one.")
    async_queue_size: int = flag(
        1,
        "Maximum weight updates between generating a sample and training on it; 0 means synchronous training.",
        NOT_NEGATIVE,
        needs="async_train",
    )
    partial_rollout: bool = flag(False, "Continue unfinished samples after a weight sync (needs --async_train).")


@dataclass(frozen=True, kw_only=True)
class RewardFlags:
    """Rewards and agents"""

    reward_pretrain: str | None = flag(
        None,
        "Comma-separated reward models; with an agent, they score episodes for which the agent returns no reward.",
        essential=True,
    )
    reward_weights: tuple[float, ...] = flag((), "Weight of each reward model (default: 1 each).")
    remote_rm_url: str | None = flag(
        None, "Comma-separated reward servers, or a .py file with reward_func.", essential=True
    )
    reward_api_key: str | None = flag(
        None,
        "Key of the reward servers (serve_rm --api_key); set OPENRLHF_RM_API_KEY instead to keep it off the command "
        "line.",
    )
    agent_func_path: str | None = flag(
        None, "Python file with a class AgentExecutor, or a function run_agent or step.", essential=True
    )
    normalize_reward: bool = flag(False, "Use (reward - mean) / std, with the mean and std stored in the reward model.")
    reward_clip_range: tuple[float, float] = flag((-10.0, 10.0), "Range to which shaped rewards are clipped.")
    overlong_buffer_len: float | None = flag(
        None, "Number of tokens before the length limit over which the overlong penalty grows.", POSITIVE
    )
    overlong_penalty_factor: float = flag(1.0, "Maximum overlong penalty.", NOT_NEGATIVE, needs="overlong_buffer_len")
    stop_properly_penalty_coef: float | None = flag(
        None,
        "Factor in [0, 1] on the reward of truncated samples; a negative value replaces their reward.",
        AT_MOST_ONE,
    )
    step_rewards: bool = flag(
        False,
        "Assign a reward at the end of each agent turn, or of each step that a process reward model scores, instead "
        "of one reward at the last token.",
    )
    prm_reduce: Literal["min", "mean", "last", "product"] = flag(
        "min",
        "How a process reward model's step scores become one score per sample and, without --step_rewards, its reward.",
    )
    reward_timeout: float = flag(
        180.0, "Timeout in seconds for one call to a reward function, agent step or reward server.", POSITIVE
    )
    on_reward_error: Literal["stop", "skip"] = flag("stop", "If a reward call fails, stop the run or skip the sample.")
    max_turns: int | None = flag(
        None, "Maximum turns per agent episode (default: no limit).", POSITIVE, needs="agent_func_path"
    )
    max_concurrent_episodes: int | None = flag(
        None,
        "Maximum number of concurrent episodes (samples). All samples of a prompt start together, so a limit below "
        "--n_samples_per_prompt runs one prompt at a time (default: no limit).",
        POSITIVE,
    )
    max_episodes_per_engine: int | None = flag(None, "Maximum concurrent episodes per engine.", POSITIVE)

    @property
    def reward_models(self) -> tuple[str, ...]:
        return split_names(self.reward_pretrain)

    @property
    def scored_by_models(self) -> bool:
        """True if reward models score samples; with an agent, only episodes for which the agent returns no reward."""
        return bool(self.reward_models) and bool(self.agent_func_path or not self.remote_rm_url)

    @property
    def reward_servers(self) -> tuple[str, ...]:
        """Addresses of reward servers; empty if --remote_rm_url is a Python file or function."""
        return () if self.reward_file or is_in_memory(self.remote_rm_url) else split_names(self.remote_rm_url)

    @property
    def reward_file(self) -> str | None:
        given = (self.remote_rm_url or "").strip()
        return given if given.endswith(".py") else None


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
        needs="eval_dataset",
    )
