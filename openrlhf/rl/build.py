"""Build the models of reinforcement learning from the config: policy, critic, reference and reward models.

The local runtime builds all of them in one process (`rl.local`). On a cluster, each worker builds the models of its
roles (`cluster.actors`). `training.build` builds networks and backends, as for supervised training. This module also
defines the sizes of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import (
    critic_model,
    policy_loss_flags,
    policy_ranks,
    reference_is_base,
    steps_per_rollout,
    uses_critic,
    uses_reference,
)
from openrlhf.config.sections.cluster import ROLES, Role
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout
from openrlhf.data.retokenization import Retokenizer
from openrlhf.errors import ConfigError
from openrlhf.models.forward import Network
from openrlhf.models.load import load_tokenizer
from openrlhf.models.router_replay import RoutedLayers
from openrlhf.monitor import say
from openrlhf.rl.models import Critic, Models, Policy
from openrlhf.rl.reward_models import ProcessRewardModel, RewardModel, load_reward_model, share_vocabulary
from openrlhf.rl.samples import Batching
from openrlhf.training.backend import Frozen
from openrlhf.training.base_reference import BaseReference
from openrlhf.training.build import (
    load_language_model,
    load_trained_scalar_model,
    make_backend,
    make_frozen,
    make_network,
    replace_unavailable_attention,
)
from openrlhf.training.optim import schedule
from openrlhf.training.rl_objectives import PolicyObjective, ValueObjective


def build_models(
    config: RLConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    rollouts: int,
    roles: Collection[Role] = ROLES,
    rewards: Collection[int] | None = None,
) -> Models:
    """Build the models that the flags require and that have one of the `roles`.

    `rewards` selects reward models by their index in --reward_pretrain (default: all).
    """
    config = replace_unavailable_attention(config, device)
    total_steps = rollouts * steps_per_rollout(config)
    # The order matters, because new heads and adapters are initialised with torch's random numbers.
    policy = build_policy(config, device, total_steps) if "actor" in roles else None
    has_critic = "critic" in roles and uses_critic(config)
    critic = build_critic(config, tokenizer, device, total_steps) if has_critic else None
    reference: Frozen | None = None
    if "ref" in roles and uses_reference(config):
        reference = build_reference(config, policy, device)
    return Models(
        policy,
        critic,
        reference,
        build_reward_models(config, tokenizer, device, rewards) if "reward" in roles else (),
        temperature=config.rollout.temperature,
        sleeps=config.placement.deepspeed_enable_sleep,
    )


def build_reference(config: RLConfig, policy: Policy | None, device: torch.device) -> Frozen:
    """Load the reference; if it is the base of the policy's adapters, and this process has the policy, use that."""
    if policy is not None and reference_is_base(config):
        return BaseReference(policy.backend)
    model = load_language_model(config, config.critic.ref_pretrain or str(config.model.pretrain), device)
    network = Network(model, self_test=not config.model.skip_self_test)
    return make_frozen(config, network, device, offload=config.critic.ref_reward_offload)


def build_policy(config: RLConfig, device: torch.device, total_steps: int) -> Policy:
    """Load the policy and set up its optimizer, schedule and objective."""
    network = make_network(config, load_language_model(config, str(config.model.pretrain), device), scalar=False)
    if config.rollout.router_replay:
        network.routed = RoutedLayers(network.decoder)
    flags, rate = config.optimizer, config.optimizer.actor_learning_rate
    backend = make_backend(config, network, flags, rate, device, role="policy")
    return Policy(
        backend,
        make_schedule(flags, total_steps),
        total_steps,
        rate,
        PolicyObjective(
            settings=policy_loss_flags(config),
            temperature=config.rollout.temperature,
            kl_coef=config.kl.init_kl_coef if config.kl.use_kl_loss else 0.0,
            kl_estimator=config.kl.kl_estimator,
            kl_unbiased_gradient=config.kl.kl_unbiased_gradient,
            entropy_coef=config.policy.entropy_loss_coef,
            aux_loss_coef=config.model.aux_loss_coef,
            constant_length=config.rollout.longest_response,
        ),
        config.policy.ema_beta if config.policy.enable_ema else None,
    )


def build_critic(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, total_steps: int
) -> Critic:
    """Load the critic with its scalar head and set up its optimizer, schedule and objective.

    The critic gets the policy's tokens as input, so its tokenizer must have all of them.
    """
    name = str(critic_model(config))
    if not share_vocabulary(tokenizer, load_tokenizer(name, config.model)):
        raise ConfigError(
            f"the critic {name} has a different tokenizer than the policy",
            try_this="--critic_pretrain with the policy's tokenizer",
        )
    network = make_network(config, load_trained_scalar_model(config, name, device), scalar=True)
    flags, rate = config.optimizer.critic, config.optimizer.critic_learning_rate
    backend = make_backend(config, network, flags, rate, device, role="critic")
    objective = ValueObjective(config.policy.value_clip, config.model.aux_loss_coef)
    return Critic(backend, make_schedule(flags, total_steps), total_steps, rate, objective)


def build_reward_models(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, numbers: Collection[int] | None
) -> list[RewardModel]:
    """Load the selected reward models (None: all); return an empty list if reward models are not used.

    A reward model with the policy's vocabulary scores the sampled tokens; otherwise the text is tokenised again.
    """
    rewards, packing = config.rewards, config.batches.packing_samples
    if not rewards.scored_by_models:
        return []
    weights = rewards.reward_weights or (1.0,) * len(rewards.reward_models)
    built = []
    for number, (name, weight) in enumerate(zip(rewards.reward_models, weights, strict=True)):
        if numbers is not None and number not in numbers:
            continue
        own = load_tokenizer(name, config.model)
        shared = share_vocabulary(tokenizer, own)
        if not shared:
            say(f"the reward model {name} has a different tokenizer than the policy: samples are tokenised again")
        model = load_reward_model(
            name,
            config.model,
            device,
            texts=Retokenizer(tokenizer, own, shared),
            batching=scoring_batches(config, Layout(packing=packing, pad_id=own.pad_token_id)),
            head_prefix=config.head.value_head_prefix,
            normalize=rewards.normalize_reward,
            run=config,
        )
        if isinstance(model, ProcessRewardModel):
            model = replace(model, reduce=rewards.prm_reduce)
        built.append(replace(model, weight=weight))
    return built


def scoring_batches(config: RLConfig, layout: Layout, *, ranks: int = 1, sharing_limit: int = 0) -> Batching:
    """Return the micro-batching for forward-only passes of the policy, reference, critic and reward models."""
    rollout = config.rollout
    budget = rollout.scoring_token_budget if rollout.use_dynamic_batch else None
    return Batching(layout, rollout.micro_rollout_batch_size, budget, ranks, sharing_limit)


def training_batches(config: RLConfig, layout: Layout, *, sharing_limit: int) -> Batching:
    """Return the micro-batching for training, over the data-parallel ranks of the policy."""
    rollout = config.rollout
    budget = rollout.train_max_tokens_per_gpu if rollout.use_dynamic_batch else None
    return Batching(layout, config.batches.micro_train_batch_size, budget, policy_ranks(config), sharing_limit)


def make_schedule(flags: OptimizerFlags, steps: int) -> Callable[[int], float]:
    """Return the learning rate schedule that the optimizer flags of the policy or the critic select.

    A warm-up begins at half the rate of its second step; at zero, as in Transformers, it would waste a rollout.
    """
    scheduled = schedule(
        flags.lr_scheduler, warmup_ratio=flags.lr_warmup_ratio, total_steps=steps, min_lr_ratio=flags.min_lr_ratio
    )
    if scheduled(0) > 0:
        return scheduled
    return lambda step: scheduled(step) if step > 0 else scheduled(1) / 2
