"""Values derived from several sections of a config: devices, models in use, numbers of steps, loss defaults.

The checks, the table of batch sizes and the run itself all call these functions, so their values agree. Values derived
from a single section are properties of that section.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from openrlhf.config.commands import DPOConfig, KTOConfig, RLConfig, TrainingConfig
from openrlhf.config.flags import replace_flags
from openrlhf.config.sections.algorithm import PolicyLossFlags
from openrlhf.config.sections.cluster import ROLES, Role

GPUS_PER_NODE_ON_RAY = 8  # default for --*_num_gpus_per_node on Ray


# Runtime, devices and engines.


def backend_of(config: TrainingConfig, processes: int) -> Literal["local", "deepspeed", "fsdp"]:
    """Return the library that trains a model in this many processes.

    By default, several processes use DeepSpeed; a single one needs it only to read a universal checkpoint.
    """
    if config.sharding.backend != "auto":
        return config.sharding.backend
    return "deepspeed" if processes > 1 or config.checkpoints.use_ds_universal_ckpt else "local"


def resolve_runtime(config: RLConfig, environ: Mapping[str, str] = os.environ) -> Literal["local", "ray"]:
    """Choose the runtime; `auto` means Ray if there is a cluster to join, or more than one node, device or engine."""
    if config.placement.runtime != "auto":
        return config.placement.runtime
    joins = "RAY_ADDRESS" in environ or "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ
    return "ray" if joins or several_devices(config) or (config.engines.vllm_num_engines or 0) > 1 else "local"


def several_devices(config: RLConfig) -> bool:
    placement = config.placement
    asked = [placement.num_nodes(role) * (placement.given_gpus_per_node(role) or 1) for role in ROLES]
    return max(*asked, config.engines.devices_per_engine) > 1


def launched_nodes() -> int:
    """Return the number of nodes on which a launcher started processes; 1 without a launcher."""
    processes = os.environ.get("WORLD_SIZE", "1")
    per_node = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or processes  # torchrun, deepspeed
    return int(processes) // int(per_node)


def num_devices(config: RLConfig, role: Role, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of devices of a role over all its nodes."""
    given = config.placement.given_gpus_per_node(role)
    default = GPUS_PER_NODE_ON_RAY if resolve_runtime(config, environ) == "ray" else 1
    return config.placement.num_nodes(role) * (default if given is None else given)


def policy_ranks(config: RLConfig) -> int:
    """Return the number of data-parallel ranks of the policy.

    Ring and tensor-parallel peers work on the same samples and count as one rank.
    """
    return num_devices(config, "actor") // (config.sharding.ring_attn_size * config.sharding.ds_tensor_parallel_size)


def num_engines(config: RLConfig, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of vLLM engines; without vLLM, one Transformers engine per policy process."""
    engines = config.engines
    if engines.vllm_num_engines:
        return engines.vllm_num_engines * (engines.vllm_engines_per_gpu or 1)
    return num_devices(config, "actor", environ)


def most_episodes(config: RLConfig, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the maximum number of concurrent episodes: the smaller of two limits, or None if neither is set."""
    rewards = config.rewards
    each = rewards.max_episodes_per_engine
    limits = [rewards.max_concurrent_episodes, None if each is None else each * num_engines(config, environ)]
    return min((limit for limit in limits if limit is not None), default=None)


def caches_prefixes(config: RLConfig) -> bool:
    """Return True if vLLM reuses the KV cache of common prefixes; by default, for agents, whose turns share them.

    vLLM reports the experts of a prompt only together with its KV cache.
    """
    given = config.engines.enable_prefix_caching
    needed = config.rewards.agent_func_path is not None or config.rollout.router_replay
    return needed if given is None else given


def generates_in_lockstep(config: RLConfig) -> bool:
    """Return True if the engine waits until all running episodes have a request, which makes runs reproducible."""
    return resolve_runtime(config) == "local" and not config.engines.vllm_num_engines


# Which models a run uses.


def uses_critic(config: RLConfig) -> bool:
    return config.advantage.advantage_estimator == "gae"


def uses_reference(config: RLConfig) -> bool:
    return config.kl.init_kl_coef > 0


def reference_is_base(config: DPOConfig | KTOConfig | RLConfig) -> bool:
    """Return True if the reference is the model below the adapters of the policy."""
    reference = config.critic.ref_pretrain if isinstance(config, RLConfig) else config.reference.ref_pretrain
    return config.lora.lora_rank > 0 and reference in (None, config.model.pretrain)


def loads_reference(config: RLConfig) -> bool:
    """Return True if the reference is a separate model; a shared one must be in the policy's processes."""
    placement = config.placement
    together = resolve_runtime(config) == "local" or placement.colocate_all_models or placement.colocate_actor_ref
    return uses_reference(config) and not (together and reference_is_base(config))


def uses_vllm(config: RLConfig) -> bool:
    """Return True if vLLM generates: it is requested, and the run does not train on recorded rollouts."""
    return bool(config.engines.vllm_num_engines) and config.rollout.replay is None


def used_roles(config: RLConfig) -> list[Role]:
    runs = {"ref": uses_reference(config), "critic": uses_critic(config), "reward": config.rewards.scored_by_models}
    return [role for role in ROLES if runs.get(role, True)]


def critic_model(config: RLConfig) -> str | None:
    """Return the model that the critic starts from: the flag, else the first reward model, else the policy."""
    if not uses_critic(config):
        return None
    rewards = config.rewards
    first_reward_model = rewards.reward_models[0] if rewards.scored_by_models and not rewards.agent_func_path else None
    return config.critic.critic_pretrain or first_reward_model or config.model.pretrain


# Numbers of rollouts and steps. `num_prompts` counts the prompts of all episodes.


def queue_size(config: RLConfig) -> int:
    """Return the maximum age of a rollout in training, in weight versions; 0 means synchronous training.

    With oversampling, a rollout may contain older samples, see `staleness_limit`.
    """
    return config.asynchrony.async_queue_size if config.asynchrony.async_train else 0


def is_asynchronous(config: RLConfig) -> bool:
    """Return True if samples may come from older weights than those being trained."""
    return queue_size(config) > 0


def surplus_groups(config: RLConfig) -> int:
    """Return the number of groups that run in addition to those of a rollout (oversampling); 0 in lockstep."""
    asked, size = config.rollout.vllm_generate_batch_size, config.rollout.rollout_batch_size
    return 0 if asked is None or generates_in_lockstep(config) else max(0, asked - size)


def staleness_limit(config: RLConfig) -> int | None:
    """Return the maximum age of a sample in training, in weight versions; None means that none is enforced.

    Without oversampling, no sample is older than `queue_size` anyway.
    """
    if not surplus_groups(config):
        return None
    return config.asynchrony.max_staleness if is_asynchronous(config) else 0


def num_rollouts(config: RLConfig, num_prompts: int) -> int:
    """Return the maximum number of rollouts; filtering may end a run earlier."""
    rollouts = math.ceil(num_prompts / config.rollout.rollout_batch_size)
    return rollouts if config.batches.max_steps is None else min(rollouts, config.batches.max_steps)


def steps_per_rollout(config: RLConfig) -> int:
    """Return the number of optimizer steps per full rollout."""
    batches = config.batches
    return math.ceil(config.rollout.samples_per_rollout / batches.train_batch_size) * batches.max_epochs


def num_optimizer_steps(config: RLConfig, num_prompts: int) -> int:
    """Return the number of optimizer steps of a run in which no group is filtered out."""
    size, samples = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    prompts = (min(size, num_prompts - size * rollout) for rollout in range(num_rollouts(config, num_prompts)))
    batches = sum(math.ceil(count * samples / config.batches.train_batch_size) for count in prompts)
    return batches * config.batches.max_epochs


def evaluation_config(config: RLConfig) -> RLConfig:
    """Return the config for evaluation, with its sample count and temperature and without filtering."""
    return replace_flags(
        config,
        n_samples_per_prompt=config.prompts.eval_n_samples_per_prompt,
        temperature=config.prompts.eval_temperature,
        dynamic_filtering=False,
    )


# Which log-probs the loss compares.


def uses_correction(config: RLConfig) -> bool:
    """Return True if importance correction is on; by default, it is on if samples may be stale."""
    given = config.policy.enable_vllm_is_correction
    return is_asynchronous(config) if given is None else given


def old_log_probs_are_the_engines(config: RLConfig) -> bool:
    """Return True if the engine's log-probs are the old log-probs of the ratio: for stale samples without correction.

    The trainer no longer has the weights that generated them, so only the engine's log-probs are available. They can be
    used only if they cover the whole distribution.
    """
    whole = config.rollout.whole_log_probs or not config.rollout.limits_on_tokens
    return is_asynchronous(config) and not uses_correction(config) and whole


def compares_engine(config: RLConfig) -> bool:
    """Return True if the loss compares the log-probs of engine and trainer, so both must use the same distribution."""
    return uses_correction(config) or old_log_probs_are_the_engines(config)


def scores_policy(config: RLConfig) -> bool:
    """Return True if the policy must score its samples before training on them.

    Its log-probs are needed for a KL term in the reward, for importance correction, and as the old log-probs if a
    rollout takes several optimizer steps. With a single step per rollout, the old log-probs equal the current ones and
    need no scoring pass.
    """
    kl_in_reward = uses_reference(config) and not config.kl.use_kl_loss
    several_steps = steps_per_rollout(config) > 1 and not old_log_probs_are_the_engines(config)
    return kl_in_reward or uses_correction(config) or several_steps


def policy_loss_flags(config: RLConfig) -> PolicyLossFlags:
    """Return the policy loss section after filling in the defaults that depend on other sections.

    By default, Dr. GRPO averages its loss over a constant length, and correction is on if samples may be stale.
    """
    constant = config.advantage.advantage_estimator == "dr_grpo"
    return replace(
        config.policy,
        loss_agg_mode=config.policy.loss_agg_mode or ("constant" if constant else "token-mean"),
        enable_vllm_is_correction=uses_correction(config),
    )
