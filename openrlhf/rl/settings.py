"""Convert the flags of reinforcement learning into the settings objects of the loop's parts.

The loop, the rollouts, the scoring and the losses know only these settings, not the flags.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from openrlhf.algo.policy_loss import PolicySettings
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import (
    is_asynchronous,
    most_episodes,
    num_devices,
    old_log_probs_are_the_engines,
    resolve_runtime,
    uses_correction,
)
from openrlhf.data.collate import Layout
from openrlhf.rl.controller import LoopSettings, Settings
from openrlhf.rl.experience import ExperienceSettings
from openrlhf.rl.proof import GapSettings
from openrlhf.rl.rollouts import PromptOrder, RolloutSettings
from openrlhf.rl.samples import Batching
from openrlhf.training.rl_objectives import PolicyObjective
from openrlhf.types import SamplingParams


def num_rollouts(config: RLConfig, order: PromptOrder) -> int:
    """Return the maximum number of rollouts; filtering may end a run earlier."""
    rollouts = math.ceil(len(order) / config.rollout.rollout_batch_size)
    return rollouts if config.batches.max_steps is None else min(rollouts, config.batches.max_steps)


def steps_per_rollout(config: RLConfig) -> int:
    """Return the optimizer steps of a full rollout."""
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    return math.ceil(samples / config.batches.train_batch_size) * config.batches.max_epochs


def num_optimizer_steps(config: RLConfig, order: PromptOrder) -> int:
    """Return the optimizer steps of a run that keeps every group; a smaller last rollout gives fewer steps."""
    size, samples = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    prompts = (min(size, len(order) - size * rollout) for rollout in range(num_rollouts(config, order)))
    batches = sum(math.ceil(count * samples / config.batches.train_batch_size) for count in prompts)
    return batches * config.batches.max_epochs


def make_settings(config: RLConfig, layout: Layout) -> Settings:
    """Return all settings of the controller.

    Ring and tensor-parallel peers work on the same samples, so only the remaining ranks share the micro-batches.
    """
    rollout, logs = config.rollout, config.logs
    sampling = rollout_settings(config)
    ranks = num_devices(config, "actor") // (config.sharding.ring_attn_size * config.sharding.ds_tensor_parallel_size)
    return Settings(
        loop=LoopSettings(
            train_batch_size=config.batches.train_batch_size,
            epochs=config.batches.max_epochs,
            queue_size=config.asynchrony.async_queue_size if is_asynchronous(config) else 0,
            seed=config.batches.seed,
            max_rollouts=config.batches.max_steps,
            freezing_steps=config.policy.freezing_actor_steps,
            eval_every=logs.eval_steps,
            log_every=logs.logging_steps,
            lockstep=resolve_runtime(config) == "local",
            gap=gap_settings(config),
        ),
        rollout=sampling,
        evaluation=replace(
            sampling,
            samples_per_prompt=config.prompts.eval_n_samples_per_prompt,
            params=replace(sampling.params, temperature=config.prompts.eval_temperature),
            keep_between=None,
            step_rewards=False,  # evaluation compares one score for each sample
        ),
        experience=experience_settings(config),
        scoring=scoring_batches(config, layout, ranks),
        training=Batching(
            layout,
            config.batches.micro_train_batch_size,
            rollout.train_max_tokens_per_gpu if rollout.use_dynamic_batch else None,
            ranks,
        ),
    )


def scoring_batches(config: RLConfig, layout: Layout, ranks: int = 1) -> Batching:
    """Return the micro-batching for forward-only passes of the policy, reference, critic and reward models."""
    rollout = config.rollout
    budget = rollout.scoring_token_budget if rollout.use_dynamic_batch else None
    return Batching(layout, rollout.micro_rollout_batch_size, budget, ranks)


def gap_settings(config: RLConfig) -> GapSettings | None:
    """Return the limits on the gap between the log-probs of engine and trainer, in nats.

    None for recorded rollouts, and if sampling leaves tokens out (top-p and the like): the engine's log-probs then
    refer to the remaining tokens only and cannot be compared.
    """
    rollout = config.rollout
    if rollout.replay or rollout.limits_on_log_probs:
        return None
    separate = resolve_runtime(config) == "ray" or bool(config.engines.vllm_num_engines)
    on_cpu = config.model.device == "cpu" or (resolve_runtime(config) == "local" and not torch.cuda.is_available())
    exact = config.model.param_dtype == "fp32" or on_cpu
    return GapSettings(
        warn=1e-3 if exact else 0.05,
        stop=0.02 if exact else 0.5,
        probe=separate and is_asynchronous(config),
        probe_every=config.engines.sync_check_every,
    )


def rollout_settings(config: RLConfig) -> RolloutSettings:
    rollout = config.rollout
    return RolloutSettings(
        batch_size=rollout.rollout_batch_size,
        samples_per_prompt=rollout.n_samples_per_prompt,
        params=SamplingParams(
            max_tokens=rollout.response_length or rollout.context_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            min_tokens=rollout.min_new_tokens,
            stop=rollout.stop,
        ),
        context_length=rollout.context_length,
        seed=config.batches.seed,
        keep_between=rollout.dynamic_filtering_reward_range if rollout.dynamic_filtering else None,
        most_episodes=most_episodes(config),
        most_prompts=rollout.vllm_generate_batch_size,
        step_rewards=config.rewards.step_rewards,
        lockstep=resolve_runtime(config) == "local" and not config.engines.vllm_num_engines,
    )


def experience_settings(config: RLConfig) -> ExperienceSettings:
    """Return the settings for rewards and advantages, and whether the policy must score its samples again."""
    rewards = config.rewards
    longest = config.rollout.response_length or config.rollout.context_length
    kl_in_reward = not config.kl.use_kl_loss
    return ExperienceSettings(
        estimator=config.advantage.advantage_estimator,
        gamma=config.advantage.gamma,
        lambd=config.advantage.lambd,
        divide_by_std=not config.advantage.no_advantage_std_norm,
        kl_estimator=config.kl.kl_estimator,
        kl_in_reward=kl_in_reward,
        clip_range=rewards.reward_clip_range,
        overlong=None
        if rewards.overlong_buffer_len is None
        else (longest, rewards.overlong_buffer_len, rewards.overlong_penalty_factor),
        stop_properly=rewards.stop_properly_penalty_coef,
        step_rewards=rewards.step_rewards,
        scores_policy=(config.kl.init_kl_coef > 0 and kl_in_reward)
        or uses_correction(config)
        # With a single step per rollout, the old log-probs equal the current ones and need no scoring pass.
        or (steps_per_rollout(config) > 1 and not old_log_probs_are_the_engines(config)),
        old_from_engine=old_log_probs_are_the_engines(config),
    )


def policy_objective(config: RLConfig) -> PolicyObjective:
    """Return the policy objective; by default, Dr. GRPO aggregates its loss over a constant length."""
    policy, low_high = config.policy, config.policy.clip_range
    constant = config.advantage.advantage_estimator == "dr_grpo"
    return PolicyObjective(
        settings=PolicySettings(
            loss_type=policy.policy_loss_type,
            eps_low=low_high[0],
            eps_high=low_high[1],
            dual_clip=policy.dual_clip,
            loss_agg_mode=policy.loss_agg_mode or ("constant" if constant else "token-mean"),
            correction=policy.vllm_is_correction_type if uses_correction(config) else None,
            correction_range=policy.correction_range,
        ),
        temperature=config.rollout.temperature,
        kl_coef=config.kl.init_kl_coef if config.kl.use_kl_loss else 0.0,
        kl_estimator=config.kl.kl_estimator,
        kl_unbiased_gradient=config.kl.kl_unbiased_gradient,
        entropy_coef=policy.entropy_loss_coef,
        aux_loss_coef=config.model.aux_loss_coef,
        constant_length=config.rollout.response_length or config.rollout.context_length,
    )
