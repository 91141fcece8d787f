"""Flags of RL rollouts, rewards and losses that have no effect in some runs; see `lines`."""

from openrlhf.config.commands import RLConfig
from openrlhf.config.in_memory import is_in_memory
from openrlhf.config.no_effect.lines import rows
from openrlhf.config.runtime import loads_reference, surplus_groups, uses_correction, uses_critic, uses_reference


def replays(config: RLConfig) -> bool:
    return config.rollout.replay is not None and not config.prompts.evaluates


def response_has_another_limit(config: RLConfig) -> bool:
    """Return True if --generate_max_len is unused: with --max_len, only --max_new_tokens limits the response.

    If --max_new_tokens is not given, a rule in `checks/rl.py` copies --generate_max_len to it.
    """
    rollout = config.rollout
    return rollout.max_len is not None and rollout.max_new_tokens != rollout.generate_max_len


def has_reward_function(config: RLConfig) -> bool:
    rewards = config.rewards
    given = rewards.reward_file or is_in_memory(rewards.remote_rm_url)
    return bool(given) and not rewards.agent_func_path


RL = rows(
    RLConfig,
    # Rollouts.
    ("prompt_max_len", "with --max_len", lambda c: c.rollout.max_len is not None),
    ("generate_max_len", "with --max_len and --max_new_tokens", response_has_another_limit),
    (
        "micro_train_batch_size micro_rollout_batch_size",
        "with --use_dynamic_batch, which limits micro-batches by tokens",
        lambda c: c.rollout.use_dynamic_batch,
    ),
    (
        "top_p top_k min_p stop min_new_tokens vllm_generate_batch_size abort_stragglers max_staleness "
        "dynamic_filtering dynamic_filtering_reward_range max_concurrent_episodes",
        "with --replay, which generates nothing",
        replays,
    ),
    (
        "abort_stragglers max_staleness",
        "without oversampling (--vllm_generate_batch_size above --rollout_batch_size, with vLLM or on Ray)",
        lambda c: not surplus_groups(c),
    ),
    ("vllm_num_engines", "with --replay", lambda c: c.rollout.replay is not None),
    (
        "best_metric_key",
        "without --eval_steps and --save_steps",
        lambda c: c.prompts.evaluates and (c.logs.eval_steps == -1 or c.checkpoints.save_steps == -1),
    ),
    # Rewards.
    ("remote_rm_url", "with --agent_func_path", lambda c: c.rewards.agent_func_path),
    (
        "reward_pretrain reward_weights normalize_reward prm_reduce step_rewards",
        "with --remote_rm_url",
        lambda c: c.rewards.remote_rm_url and not c.rewards.agent_func_path,
    ),
    ("reward_weights normalize_reward prm_reduce", "without --reward_pretrain", lambda c: not c.rewards.reward_models),
    (
        "reward_api_key",
        "without reward servers (--remote_rm_url http://...)",
        lambda c: not c.rewards.reward_servers or c.rewards.agent_func_path,
    ),
    (
        "reward_timeout on_reward_error label_key",
        "if only reward models give rewards",
        lambda c: c.rewards.scored_by_models and not c.rewards.agent_func_path,
    ),
    ("reward_concurrency reward_batch_groups", "without a reward function", lambda c: not has_reward_function(c)),
    (
        "reward_processes",
        "without a .py file with a reward function or an agent",
        lambda c: not (c.rewards.reward_file or c.rewards.agent_func_path) or is_in_memory(c.rewards.agent_func_path),
    ),
    # Losses.
    (
        "critic_learning_rate critic_optim critic_lr_scheduler critic_lr_warmup_ratio critic_min_lr_ratio critic_l2 "
        "critic_adam_betas critic_adam_eps critic_max_norm critic_muon_lr critic_muon_momentum "
        "critic_muon_ns_steps critic_muon_nesterov value_clip "
        "save_value_network lambd",
        "without a critic, which only --advantage_estimator gae uses",
        lambda c: not uses_critic(c),
    ),
    (
        "critic_muon_lr critic_muon_momentum critic_muon_ns_steps critic_muon_nesterov",
        "without --critic_optim muon",
        lambda c: c.optimizer.critic.optim != "muon",
    ),
    (
        "critic_min_lr_ratio",
        "without a --critic_lr_scheduler that has a minimum learning rate, such as cosine_with_min_lr",
        lambda c: "min_lr" not in c.optimizer.critic.lr_scheduler,
    ),
    (
        "critic_lr_warmup_ratio",
        "with --critic_lr_scheduler constant; use constant_with_warmup for a warm-up",
        lambda c: c.optimizer.critic.lr_scheduler == "constant" and c.optimizer.critic_lr_warmup_ratio,
    ),
    (
        "no_advantage_std_norm",
        "with --advantage_estimator rloo, group_norm or dr_grpo, which do not whiten advantages",
        lambda c: c.advantage.advantage_estimator in ("rloo", "group_norm", "dr_grpo"),
    ),
    (
        "kl_target kl_horizon kl_estimator use_kl_loss kl_unbiased_gradient ref_pretrain",
        "with --init_kl_coef 0",
        lambda c: not uses_reference(c),
    ),
    ("eps_clip", "with --eps_clip_low_high", lambda c: c.policy.eps_clip_low_high is not None),
    (
        "vllm_is_correction_type vllm_is_truncated_threshold",
        "without --enable_vllm_is_correction",
        lambda c: not uses_correction(c),
    ),
    (
        "value_head_prefix",
        "without a critic or a reward model",
        lambda c: not (uses_critic(c) or c.rewards.scored_by_models),
    ),
    (
        "ref_reward_offload",
        "without a reward model or a separate reference (with LoRA, the reference is the policy without its adapters)",
        lambda c: not (loads_reference(c) or c.rewards.scored_by_models),
    ),
)
