"""Build the models of reinforcement learning from the config: policy, critic, reference and reward models.

The local runtime builds all of them in one process. On a cluster, each worker builds those of its roles. How their
micro-batches are cut is decided here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import (
    critic_model,
    policy_loss_flags,
    policy_ranks,
    steps_per_rollout,
    uses_critic,
    uses_reference,
)
from openrlhf.config.sections.cluster import ROLES, Role
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout
from openrlhf.data.process import one_token
from openrlhf.data.readings import Texts
from openrlhf.data.tokens import check_fast
from openrlhf.errors import ConfigError
from openrlhf.models.forward import Network
from openrlhf.models.load import (
    add_adapters,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    read_config,
    recompute_activations,
)
from openrlhf.monitor import say
from openrlhf.rl.models import Critic, Models, Policy, Trained
from openrlhf.rl.reward_models import OutcomeScorer, ProcessScorer, Scorer, share_vocabulary
from openrlhf.rl.samples import Batching
from openrlhf.training.backend import Frozen, TrainBackend
from openrlhf.training.distributed import loading, uses_deepspeed
from openrlhf.training.local import LocalBackend, LocalFrozen
from openrlhf.training.model_checks import balances_experts
from openrlhf.training.objectives import AUX_ON
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
    """Build the models that the flags ask for and that have one of the `roles`.

    `rewards` selects reward models by their place in --reward_pretrain (default: all).
    """
    total_steps = rollouts * steps_per_rollout(config)
    return Models(
        policy=build_policy(config, device, total_steps) if "actor" in roles else None,
        critic=build_critic(config, tokenizer, device, total_steps)
        if "critic" in roles and uses_critic(config)
        else None,
        reference=build_reference(config, device) if "ref" in roles and uses_reference(config) else None,
        scorers=build_scorers(config, tokenizer, device, rewards) if "reward" in roles else (),
        temperature=config.rollout.temperature,
        sleeps=config.placement.deepspeed_enable_sleep,
    )


def build_policy(config: RLConfig, device: torch.device, total_steps: int) -> Policy:
    """Load the policy and set up its optimizer, schedule and objective."""
    network = Network(
        trainable_model(config, device),
        with_aux_loss=config.model.aux_loss_coef > AUX_ON,
        self_test=not config.model.skip_self_test,
    )
    flags, rate = config.optimizer, config.optimizer.actor_learning_rate
    backend = make_backend(config, network, flags, rate, device)
    return Policy(
        Trained(backend, make_schedule(flags, total_steps), total_steps, rate),
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


def build_reference(config: RLConfig, device: torch.device) -> Frozen:
    """Load the frozen reference: --ref_pretrain, or by default --pretrain."""
    name = config.critic.ref_pretrain or str(config.model.pretrain)
    with loading(config, device):
        model = load_causal_lm(name, config.model, device=device, packing=config.batches.packing_samples)
    return make_frozen(config, model, device)


def make_frozen(config: RLConfig, model: PreTrainedModel, device: torch.device) -> Frozen:
    """Wrap a reference or reward model for inference, locally for one process or in DeepSpeed for several."""
    offload = config.critic.ref_reward_offload
    if not uses_deepspeed(config):
        return LocalFrozen(Network(model, self_test=not config.model.skip_self_test), device, offload=offload)
    from openrlhf.training.deepspeed import DeepSpeedFrozen

    return DeepSpeedFrozen(
        Network(model, self_test=not config.model.skip_self_test), config.sharding, device, offload=offload
    )


def trainable_model(config: RLConfig, device: torch.device) -> torch.nn.Module:
    """Load the policy's model, with adapters and gradient checkpointing as configured."""
    with loading(config, device):
        model = load_causal_lm(
            str(config.model.pretrain), config.model, device=device, packing=config.batches.packing_samples
        )
    return adapted(config, model, scalar=False)


def adapted(config: RLConfig, model: PreTrainedModel, *, scalar: bool) -> torch.nn.Module:
    """Add LoRA adapters and gradient checkpointing as configured."""
    made = add_adapters(model, config.lora, scalar=scalar)
    if config.sharding.gradient_checkpointing:
        recompute_activations(made, reentrant=config.sharding.gradient_checkpointing_use_reentrant)
    return made


def make_backend(
    config: RLConfig, network: Network, optimizer: OptimizerFlags, rate: float, device: torch.device
) -> TrainBackend:
    """Wrap the network in the local backend for one process, or in DeepSpeed for several."""
    if not uses_deepspeed(config):
        return LocalBackend(
            network,
            optimizer,
            device,
            learning_rate=rate,
            adam_offload=config.sharding.adam_offload,
            compile_layers=config.sharding.deepcompile,
        )
    from openrlhf.training.deepspeed import DeepSpeedBackend

    universal = config.checkpoints.use_ds_universal_ckpt
    return DeepSpeedBackend(
        network, optimizer, config.sharding, device, learning_rate=rate, universal_checkpoint=universal
    )


def build_critic(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, total_steps: int
) -> Critic:
    """Load the critic with its scalar head and set up its optimizer, schedule and objective.

    The critic reads the policy's tokens, so its tokenizer must have all of them.
    """
    name = str(critic_model(config))
    if not share_vocabulary(tokenizer, load_tokenizer(name, config.model)):
        raise ConfigError(f"the critic {name} has another tokenizer than the policy", try_this="--critic_pretrain")
    model = load_scalar_model(
        name,
        config.model,
        device=device,
        packing=config.batches.packing_samples,
        head_prefix=config.head.value_head_prefix,
        new_head=True,
    )
    network = Network(
        adapted(config, model, scalar=True),
        with_aux_loss=balances_experts(config.model, model.config),
        self_test=not config.model.skip_self_test,
    )
    flags, rate = config.optimizer.critic, config.optimizer.critic_learning_rate
    backend = make_backend(config, network, flags, rate, device)
    trained = Trained(backend, make_schedule(flags, total_steps), total_steps, rate)
    return Critic(trained, ValueObjective(config.policy.value_clip, config.model.aux_loss_coef))


def build_scorers(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, numbers: Collection[int] | None
) -> list[Scorer]:
    """Build a scorer for each of the selected reward models; none if rewards come from elsewhere."""
    rewards = config.rewards
    if not rewards.scored_by_models:
        return []
    weights = rewards.reward_weights or (1.0,) * len(rewards.reward_models)
    return [
        build_scorer(config, name, weight, tokenizer, device)
        for number, (name, weight) in enumerate(zip(rewards.reward_models, weights, strict=True))
        if numbers is None or number in numbers
    ]


def build_scorer(
    config: RLConfig, name: str, weight: float, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Scorer:
    """Load one reward model; its config.json tells a process reward model from one that scores whole samples."""
    own = load_tokenizer(name, config.model)
    shared = share_vocabulary(tokenizer, own)
    if not shared:
        say(f"the reward model {name} has another tokenizer: it scores the text, tokenised again")
    texts = Texts(tokenizer, own, shared)
    packing = config.batches.packing_samples
    batching = scoring_batches(config, Layout(packing=packing, pad_id=own.pad_token_id))
    saved = read_config(name, config.model).to_dict()
    if "placeholder_token" in saved:
        check_fast(own)
        with loading(config, device):
            model = load_causal_lm(name, config.model, device=device, packing=packing)
        return ProcessScorer(
            make_frozen(config, model, device),
            texts,
            batching,
            one_token(own, saved["placeholder_token"], "placeholder_token in config.json"),
            tuple(one_token(own, token, "reward_tokens in config.json") for token in saved["reward_tokens"]),
            config.rewards.prm_reduce,
            weight,
        )
    prefix = config.head.value_head_prefix
    model = load_scalar_model(name, config.model, device=device, packing=packing, head_prefix=prefix)
    if config.rewards.normalize_reward and "mean" not in saved:
        say(f"--normalize_reward: {name} has no mean and std in its config.json, so its scores stay as they are")
    normalises = config.rewards.normalize_reward
    return OutcomeScorer(
        make_frozen(config, model, device),
        texts,
        batching,
        weight,
        saved.get("mean", 0.0) if normalises else 0.0,
        saved.get("std", 1.0) if normalises else 1.0,
    )


def scoring_batches(config: RLConfig, layout: Layout, ranks: int = 1) -> Batching:
    """Return the micro-batching for forward-only passes of the policy, reference, critic and reward models."""
    rollout = config.rollout
    budget = rollout.scoring_token_budget if rollout.use_dynamic_batch else None
    return Batching(layout, rollout.micro_rollout_batch_size, budget, ranks)


def training_batches(config: RLConfig, layout: Layout) -> Batching:
    """Return the micro-batching for training, shared out over the ranks of the policy."""
    rollout = config.rollout
    budget = rollout.train_max_tokens_per_gpu if rollout.use_dynamic_batch else None
    return Batching(layout, config.batches.micro_train_batch_size, budget, policy_ranks(config))


def make_schedule(flags: OptimizerFlags, steps: int) -> Callable[[int], float]:
    """Return the learning rate schedule of the policy, or of the critic from its own section."""
    return schedule(
        flags.lr_scheduler, warmup_ratio=flags.lr_warmup_ratio, total_steps=steps, min_lr_ratio=flags.min_lr_ratio
    )
