"""Checks of the flags against each model's config.json, before any weights load."""

from __future__ import annotations

from transformers import PretrainedConfig

from openrlhf.config.commands import RLConfig, TrainingConfig
from openrlhf.config.runtime import critic_model
from openrlhf.config.sections.model import ModelFlags
from openrlhf.errors import ConfigError
from openrlhf.models.load import read_config
from openrlhf.models.ring import check_ring
from openrlhf.monitor import say
from openrlhf.training.objectives import AUX_ON


def check_models(config: TrainingConfig) -> None:
    """Check the flags for experts, ring attention and tensor parallelism against the models to be trained."""
    sharding = config.sharding
    if config.model.aux_loss_coef <= AUX_ON and sharding.ring_attn_size == sharding.ds_tensor_parallel_size == 1:
        return
    name = str(config.model.pretrain)
    trained = read_config(name, config.model)
    check_layout(config, name, trained)
    if config.model.aux_loss_coef > AUX_ON and not has_experts(trained):
        raise ConfigError(
            f"--aux_loss_coef {config.model.aux_loss_coef:g} balances the experts of a mixture, but {name} has none",
            try_this="without --aux_loss_coef",
        )
    if isinstance(config, RLConfig) and (name := critic_model(config)) is not None:
        critic = read_config(name, config.model)
        check_layout(config, name, critic)
        if config.model.aux_loss_coef > AUX_ON and not has_experts(critic):
            say(f"--aux_loss_coef does not apply to the critic: {name} has no experts")


def check_layout(config: TrainingConfig, name: str, model: PretrainedConfig) -> None:
    """Check that the ring attention settings suit the model and that tensor parallelism divides its heads."""
    if config.sharding.ring_attn_size > 1:
        check_ring(model, config.sharding)
    size = config.sharding.ds_tensor_parallel_size
    heads = getattr(model.get_text_config(), "num_attention_heads", size)
    if heads % size:
        raise ConfigError(f"--ds_tensor_parallel_size {size} does not divide the {heads} attention heads of {name}")


def has_experts(config: PretrainedConfig) -> bool:
    return "router_aux_loss_coef" in config.to_dict()


def balances_experts(model: ModelFlags, config: PretrainedConfig) -> bool:
    """Return whether the load-balancing loss is on and the model has experts."""
    return model.aux_loss_coef > AUX_ON and has_experts(config)
