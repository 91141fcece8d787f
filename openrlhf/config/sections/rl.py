"""Flags of the data of reinforcement learning: prompts, rollouts and rewards. `algorithm.py` has the others.

The RL loop and its workers receive these sections unchanged; they are frozen and picklable. Values derived from one
section are properties of that section; values derived from several are functions in `config/runtime.py`.
"""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_OR_MINUS_ONE,
    POSITIVE_SHARE,
    SHARE,
    Range,
    flag,
)
from openrlhf.config.in_memory import is_in_memory
from openrlhf.config.sections.data import INPUT_HELP, EvaluationFlags, split_names

GENERATE_MAX_LEN = 1024

EXPLORING = Range(
    "above 0: at 0 the most likely token is always chosen, so nothing is explored", lambda value: value > 0
)
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
    input_key: str = flag("input", INPUT_HELP, essential=True)
    label_key: str | None = flag(None, "Field passed to the reward function or agent as the label.", essential=True)
    max_samples: int = flag(100_000_000, "Maximum rows per dataset, and in total after mixing.", POSITIVE)
    dataloader_num_workers: int = flag(0, "Accepted, but unused: prompts are prepared before training.", NOT_NEGATIVE)
    eval_temperature: float = flag(
        0.6, "Sampling temperature of evaluation.", NOT_NEGATIVE, needs="eval_dataset eval_size"
    )
    eval_n_samples_per_prompt: int = flag(4, "Samples per evaluation prompt.", POSITIVE, needs="eval_dataset eval_size")


@dataclass(frozen=True, kw_only=True)
class RolloutFlags:
    """Rollout"""

    rollout_batch_size: int = flag(1024, "Prompts per rollout.", POSITIVE, essential=True)
    n_samples_per_prompt: int = flag(1, "Samples per prompt.", POSITIVE, essential=True)
    micro_rollout_batch_size: int = flag(8, "Samples per forward pass for log-probs, values and rewards.", POSITIVE)
    num_episodes: int = flag(1, "Passes over the prompts.", POSITIVE)
    prompt_max_len: int = flag(1024, "Maximum tokens per prompt; unused if --max_len is given.", POSITIVE)
    generate_max_len: int = flag(
        GENERATE_MAX_LEN, "Older name of --max_new_tokens; the default of --max_len includes it.", POSITIVE
    )
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
    router_replay: bool = flag(
        False, "Mixtures of experts: compute each token of the policy with the experts that the engine chose for it."
    )
    replay: str | None = flag(None, "Folder of recorded rollouts (RUN_DIR/rollouts) to train on instead of generating.")
    rollout_record_gib: float = flag(
        10.0,
        "Stop recording rollouts when RUN_DIR/rollouts reaches this many GiB.",
        POSITIVE,
        needs="rollout_record_share",
    )
    rollout_record_share: float = flag(1.0, "Share of the groups to record in RUN_DIR/rollouts; 0 records none.", SHARE)
    vllm_generate_batch_size: int | None = flag(
        None,
        "Prompts in progress at a time (default: --rollout_batch_size). A larger number oversamples: a rollout is "
        "complete when --rollout_batch_size prompts are accepted, and the others are left for the next rollout.",
        POSITIVE,
    )
    abort_stragglers: bool = flag(
        False,
        "With oversampling, cancel the prompts that are still running when the rollout is complete. They are generated "
        "again in the next rollout, so only the tokens generated so far are lost (default: let them continue).",
        needs="vllm_generate_batch_size",
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
    max_staleness: int | None = flag(
        None,
        "With oversampling, drop prompts with samples that would be trained more than this many weight updates after "
        "they were generated, and generate them again (default: no limit). Without oversampling, no sample is older "
        "than --async_queue_size.",
        NOT_NEGATIVE,
        needs="async_train",
    )
    partial_rollout: bool = flag(False, "Continue unfinished samples after a weight sync (needs --async_train).")
    partial_rollout_keep_cache: bool = flag(
        False,
        "Continue unfinished samples with the KV cache of the older weights instead of recomputing it; faster with "
        "long samples, but the engine's log-probs then differ more from the trainer's.",
        needs="partial_rollout",
    )


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
    reward_processes: int | None = flag(
        None,
        "Worker processes for the reward function or the agent, over all nodes of a cluster (default: half of the CPU "
        "cores of each node, at most 8).",
        POSITIVE,
    )
    reward_concurrency: int | None = flag(
        None,
        "Concurrent calls of the reward function in each worker process (default: 64 if it is async, else 1). Above "
        "1, a function that is not async is called in as many threads, so it must be thread-safe.",
        POSITIVE,
    )
    reward_batch_groups: int = flag(
        1,
        "Maximum groups (prompts with all their samples) in one call of the reward function. A call takes those that "
        "are ready and never waits for others.",
        POSITIVE,
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
