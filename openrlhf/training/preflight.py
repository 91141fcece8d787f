"""Checks and messages that depend on the models' config.json or on the device, before any weights are loaded.

The rules in `config/checks` depend only on flags. `check_models` adds rules about the architecture of the models
(experts, attention heads), `check_engines` those about vLLM's engines. The `explain_*` functions report flags that have
no effect on this device or with these models, as `config/no_effect` does for combinations of flags.
"""

from __future__ import annotations

import math

import torch
from transformers import PretrainedConfig

from openrlhf.config.commands import DPOConfig, KDConfig, KTOConfig, RLConfig, RMConfig, TrainingConfig
from openrlhf.config.no_effect.lines import answers
from openrlhf.config.no_effect.table import ON_CPU, STEPS_ONLY, WITHOUT_STEPS
from openrlhf.config.runtime import critic_model, uses_reference, uses_vllm
from openrlhf.config.sections.model import LoadingFlags, ModelFlags
from openrlhf.config.sections.training import ShardingFlags
from openrlhf.errors import ConfigError
from openrlhf.models.experts import experts_per_token, number_of_experts
from openrlhf.models.liger import liger_knows
from openrlhf.models.load import check_scalar_family, check_scalar_head, read_config
from openrlhf.models.ring import check_ring
from openrlhf.monitor import say
from openrlhf.training.expert_parallel import check_experts
from openrlhf.training.objectives import AUX_ON


def check_models(config: TrainingConfig) -> None:
    """Check the models to be trained: scalar heads, and flags for experts, ring attention and tensor parallelism."""
    scalar = config.model.pretrain if isinstance(config, RMConfig) else None
    scalar = critic_model(config) if isinstance(config, RLConfig) else scalar
    if scalar is not None:
        check_scalar_family(scalar, read_config(scalar, config.model), config.model)

    sharding, coef = config.sharding, config.model.aux_loss_coef
    sizes = (sharding.ring_attn_size, sharding.ds_tensor_parallel_size, sharding.expert_parallel_size)
    replays = isinstance(config, RLConfig) and config.rollout.router_replay
    if coef <= AUX_ON and max(sizes) == 1 and not replays:
        return
    trained: dict[str, str | None] = {"policy": config.model.pretrain}
    if isinstance(config, RLConfig):
        trained["critic"] = critic_model(config)
    for role, name in trained.items():
        if name is None:
            continue
        model = read_config(name, config.model)
        check_division(model, name, sharding)
        if role == "policy" and not number_of_experts(model):
            if sharding.expert_parallel_size > 1:
                raise ConfigError(
                    f"--expert_parallel_size {sharding.expert_parallel_size}: {name} has no experts",
                    try_this="--expert_parallel_size 1",
                )
            if replays:
                raise ConfigError(f"--router_replay: {name} has no experts", try_this="without --router_replay")
        if role == "policy" and replays and experts_per_token(model) == 1:
            raise ConfigError(
                f"--router_replay: {name} chooses one expert for each token, so a token that the engine did not record"
                " cannot be distinguished from one of expert 0",
                try_this="without --router_replay",
            )
        if coef > AUX_ON and not balances_experts(config.model, model):
            if role == "policy":
                raise ConfigError(
                    f"--aux_loss_coef {coef:g} needs a model with a router loss: {name} has no router_aux_loss_coef",
                    try_this="remove --aux_loss_coef",
                )
            say(f"--aux_loss_coef does not apply to the critic: {name} has no router_aux_loss_coef")


def check_division(model: PretrainedConfig, name: str, sharding: ShardingFlags) -> None:
    """Check that the sequences, matrices and experts of a model can be divided as the flags request."""
    if sharding.ring_attn_size > 1:
        check_ring(model, sharding)
    check_experts(model, name, sharding.expert_parallel_size)
    size = sharding.ds_tensor_parallel_size
    heads = getattr(model.get_text_config(), "num_attention_heads", size)
    if heads % size:
        raise ConfigError(f"--ds_tensor_parallel_size {size} does not divide the {heads} attention heads of {name}")
    if size > 1 and sharding.backend == "fsdp":
        from openrlhf.training.tensor_parallel import check_plan

        check_plan(model, name, size)


def check_engines(config: RLConfig) -> None:
    """Check the sizes of the vLLM engines against the policy's architecture."""
    engines, name = config.engines, str(config.model.pretrain)
    if not uses_vllm(config) or engines.devices_per_engine == 1:
        return
    model = read_config(name, config.model).get_text_config().to_dict()
    size, stages = engines.vllm_tensor_parallel_size, engines.vllm_pipeline_parallel_size
    heads, layers = model.get("num_attention_heads", size), model.get("num_hidden_layers", stages)
    if heads % size:
        raise ConfigError(
            f"--vllm_tensor_parallel_size {size} does not divide the {heads} attention heads of {name}",
            try_this=f"--vllm_tensor_parallel_size {math.gcd(size, heads)}",
        )
    if stages > layers:
        raise ConfigError(
            f"--vllm_pipeline_parallel_size {stages} is more than the {layers} layers of {name}",
            try_this=f"--vllm_pipeline_parallel_size {layers}",
        )
    if engines.vllm_enable_expert_parallel and not any("experts" in key for key in model):
        raise ConfigError(
            f"--vllm_enable_expert_parallel divides experts, but {name} has none",
            try_this="remove --vllm_enable_expert_parallel",
        )


def balances_experts(model: ModelFlags, config: PretrainedConfig) -> bool:
    """Return True if the load-balancing loss is on and the model computes it."""
    return model.aux_loss_coef > AUX_ON and "router_aux_loss_coef" in config.to_dict()


def explain_hardware(config: TrainingConfig, device: torch.device) -> None:
    """Report flags that have no effect on this device or with the models of the run."""
    found: list[str | None] = [config.model.pretrain]  # every model that the run loads
    match config:
        case RLConfig():
            found += [critic_model(config), config.critic.ref_pretrain if uses_reference(config) else None]
            found += config.rewards.reward_models if config.rewards.scored_by_models else ()
        case DPOConfig(reference=reference) | KTOConfig(reference=reference):
            found.append(reference.ref_pretrain)
        case KDConfig(objective=objective):
            found.append(objective.teacher_model)
    names = list(dict.fromkeys(name for name in found if name))
    explain_precision(config.model.param_dtype, device)
    if device.type == "cpu":
        if config.sharding.adam_offload:
            say("--adam_offload has no effect on a CPU, where the optimizer is already in host memory")
        for line in answers(config, ON_CPU):
            say(line)
    elif config.model.use_liger_kernel:
        for name in names:
            family = read_config(name, config.model).model_type
            if not liger_knows(family):
                say(f"--use_liger_kernel has no effect on {name}: Liger has no kernels for {family}")
    explain_experts(config.model, *names)


def explain_precision(asked: str, device: torch.device) -> None:
    """Report that a CPU run computes in fp32, regardless of the requested precision."""
    if device.type == "cpu" and asked != "fp32":
        say(f"no GPU: everything runs in fp32, because {asked} is many times slower on a CPU")


def explain_experts(loading: LoadingFlags, *names: str) -> None:
    """Report that --experts_implementation has no effect if no model has experts."""
    if loading.experts_implementation is None:
        return
    known = [read_config(name, loading).get_text_config().to_dict() for name in names]
    if not any("experts" in key for settings in known for key in settings):
        say(f"--experts_implementation {loading.experts_implementation} has no effect: no model has experts")


def check_reward_models(config: RLConfig) -> None:
    """Reject reward models without a head; report flags for process or outcome reward models if there are none."""
    if not config.rewards.scored_by_models:
        return
    models = config.rewards.reward_models
    scores_steps = ["placeholder_token" in read_config(name, config.model).to_dict() for name in models]
    for name, by_steps in zip(models, scores_steps, strict=True):
        if not by_steps:
            check_scalar_head(name, config.model, config.head.value_head_prefix)
    lines = [] if any(scores_steps) else answers(config, WITHOUT_STEPS)
    lines += answers(config, STEPS_ONLY) if all(scores_steps) else []
    for line in lines:
        say(line)
