"""Flags of engines and devices that have no effect in some runs; see `lines`."""

from collections.abc import Callable

from openrlhf.config.commands import RLConfig
from openrlhf.config.flags import flags_of, replace_flags
from openrlhf.config.no_effect.lines import Reason, rows
from openrlhf.config.no_effect.rl import replays
from openrlhf.config.runtime import resolve_runtime, uses_critic, uses_reference, uses_vllm
from openrlhf.config.sections.cluster import Role


def devices_idle(flags: str, why: str, when: Callable[[RLConfig], bool]) -> Reason[RLConfig]:
    """Make a row for device counts that no model uses; they still have an effect if they cause the run to use Ray."""

    def is_idle(config: RLConfig) -> bool:
        defaults = flags_of(RLConfig)
        without = replace_flags(config, **{name: defaults[name].default for name in flags.split()})
        return when(config) and resolve_runtime(without) == resolve_runtime(config)

    return flags, why, is_idle


def counts(role: Role, why: str, when: Callable[[RLConfig], bool]) -> Reason[RLConfig]:
    return devices_idle(f"{role}_num_nodes {role}_num_gpus_per_node", why, when)


def engine_and_policy_are_one(config: RLConfig) -> bool:
    return resolve_runtime(config) == "local" and not uses_vllm(config) and not config.asynchrony.async_train


WITHOUT_VLLM = "without vLLM (--vllm_num_engines)"


CLUSTER = rows(
    RLConfig,
    (
        "vllm_engines_per_gpu vllm_gpu_memory_utilization vllm_enable_sleep enable_prefix_caching enforce_eager "
        "partial_rollout partial_rollout_keep_cache vllm_enable_expert_parallel",
        WITHOUT_VLLM,
        lambda c: not uses_vllm(c),
    ),
    devices_idle("vllm_tensor_parallel_size vllm_pipeline_parallel_size", WITHOUT_VLLM, lambda c: not uses_vllm(c)),
    (
        "vllm_enable_expert_parallel",
        "with --vllm_tensor_parallel_size 1: one device holds all experts",
        lambda c: c.engines.vllm_tensor_parallel_size == 1,
    ),
    (
        "vllm_sync_backend",
        "without vLLM engines on other devices (--runtime ray)",
        lambda c: resolve_runtime(c) == "local" or not uses_vllm(c),
    ),
    (
        "vllm_sync_backend",
        "with --colocate_all_models: weights stay on their devices",
        lambda c: c.placement.colocate_all_models and not c.asynchrony.async_train,
    ),
    ("sync_check_every", "because the engine samples with the policy itself", engine_and_policy_are_one),
    ("sync_check_every engine_timeout", "with --replay, which generates nothing", replays),
    (
        "colocate_actor_ref colocate_critic_reward colocate_all_models worker_timeout",
        "in one process",
        lambda c: resolve_runtime(c) == "local",
    ),
    (
        "max_restarts",
        "without engines in their own processes (--vllm_engines_per_gpu 2, or --runtime ray)",
        lambda c: resolve_runtime(c) == "local" and not (uses_vllm(c) and c.engines.vllm_engines_per_gpu != 1),
    ),
    (
        "colocate_actor_ref colocate_critic_reward",
        "with --colocate_all_models",
        lambda c: c.placement.colocate_all_models,
    ),
    ("colocate_actor_ref", "with --init_kl_coef 0", lambda c: not uses_reference(c)),
    (
        "colocate_critic_reward",
        "without both a critic and a reward model",
        lambda c: not (uses_critic(c) and c.rewards.scored_by_models),
    ),
    counts("ref", "with --init_kl_coef 0", lambda c: not uses_reference(c)),
    counts("critic", "without a critic, which only --advantage_estimator gae uses", lambda c: not uses_critic(c)),
    counts("reward", "without a reward model", lambda c: not c.rewards.scored_by_models),
    counts(
        "critic",
        "with --colocate_all_models, which uses the policy's counts",
        lambda c: c.placement.colocate_all_models,
    ),
    counts(
        "reward",
        "with --colocate_all_models, which uses the policy's counts",
        lambda c: c.placement.colocate_all_models,
    ),
)
