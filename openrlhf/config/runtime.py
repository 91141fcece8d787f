"""Facts derived from the flags of an RL run: its runtime (local or Ray), devices per role, and which models it uses.

Checks, tables and launch code all ask here, so that they agree.
"""

import os
from collections.abc import Mapping
from typing import Literal

from openrlhf.config.commands import RLConfig
from openrlhf.config.sections.cluster import ROLES, Role

GPUS_PER_NODE_ON_RAY = 8  # default under Ray if the command names no count


def resolve_runtime(config: RLConfig, environ: Mapping[str, str] = os.environ) -> Literal["local", "ray"]:
    """Choose the runtime; `auto` means Ray if there is a cluster to join, or more than one node, device or engine."""
    placement, engines = config.placement, config.engines
    if placement.runtime != "auto":
        return placement.runtime
    if "RAY_ADDRESS" in environ or "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ:
        return "ray"
    return "ray" if several_devices(config) or (engines.vllm_num_engines or 0) > 1 else "local"


def several_devices(config: RLConfig) -> bool:
    placement = config.placement
    asked = [placement.num_nodes(role) * (placement.given_gpus_per_node(role) or 1) for role in ROLES]
    return max(*asked, config.engines.vllm_tensor_parallel_size) > 1


def launched_nodes(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of nodes on which a launcher started processes; 1 without a launcher."""
    processes = environ.get("WORLD_SIZE", "1")
    per_node = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or processes  # torchrun, deepspeed
    return int(processes) // int(per_node)


def num_devices(config: RLConfig, role: Role, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of devices of a role over all its nodes."""
    given = config.placement.given_gpus_per_node(role)
    default = GPUS_PER_NODE_ON_RAY if resolve_runtime(config, environ) == "ray" else 1
    return config.placement.num_nodes(role) * (default if given is None else given)


def num_engines(config: RLConfig, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of vLLM engines; without vLLM, one Transformers engine per policy process."""
    return config.engines.vllm_num_engines or num_devices(config, "actor", environ)


def most_episodes(config: RLConfig, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many episodes may run concurrently: the smaller of two limits, None if neither is set."""
    rewards = config.rewards
    each = rewards.max_episodes_per_engine
    limits = [rewards.max_concurrent_episodes, None if each is None else each * num_engines(config, environ)]
    return min((limit for limit in limits if limit is not None), default=None)


def uses_critic(config: RLConfig) -> bool:
    return config.advantage.advantage_estimator == "gae"


def uses_reference(config: RLConfig) -> bool:
    return config.kl.init_kl_coef > 0


def is_asynchronous(config: RLConfig) -> bool:
    """Return True if a sample may be older than the weights it is used to train."""
    return config.asynchrony.async_train and config.asynchrony.async_queue_size > 0


def uses_correction(config: RLConfig) -> bool:
    """Return whether importance correction is on: as the flag says; by default, if samples may be old."""
    given = config.policy.enable_vllm_is_correction
    return is_asynchronous(config) if given is None else given


def old_log_probs_are_the_engines(config: RLConfig) -> bool:
    """Return True if the ratio uses the engine's log-probs as the old ones: for old samples without correction.

    Only the engine knows how likely those samples were when drawn. A ratio to its log-probs is meaningful only if they
    are taken over the whole distribution.
    """
    whole = config.rollout.whole_log_probs or not config.rollout.limits_on_tokens
    return is_asynchronous(config) and not uses_correction(config) and whole


def compares_engine(config: RLConfig) -> bool:
    """Return True if the loss compares the log-probs of engine and trainer, which must then be of one distribution."""
    return uses_correction(config) or old_log_probs_are_the_engines(config)


def used_roles(config: RLConfig) -> list[Role]:
    runs = {"ref": uses_reference(config), "critic": uses_critic(config), "reward": config.rewards.scored_by_models}
    return [role for role in ROLES if runs.get(role, True)]


def uses_vllm(config: RLConfig) -> bool:
    """Return False if Transformers generates, or if the run trains on recorded rollouts."""
    return bool(config.engines.vllm_num_engines) and config.rollout.replay is None


def critic_model(config: RLConfig) -> str | None:
    """Return the model that the critic starts from: the flag, else the first reward model, else the policy."""
    if not uses_critic(config):
        return None
    rewards = config.rewards
    first_reward_model = rewards.reward_models[0] if rewards.scored_by_models and not rewards.agent_func_path else None
    return config.critic.critic_pretrain or first_reward_model or config.model.pretrain
