"""What a training run says about its flags once it knows its device and its models, before any weights load."""

from __future__ import annotations

import torch

from openrlhf.config.commands import DPOConfig, KDConfig, KTOConfig, RLConfig, TrainingConfig
from openrlhf.config.no_effect.lines import answers
from openrlhf.config.no_effect.table import ON_CPU, STEPS_ONLY, WITHOUT_STEPS
from openrlhf.config.runtime import critic_model, uses_reference
from openrlhf.config.sections.model import Loading
from openrlhf.launch.device import explain_offloading, explain_precision
from openrlhf.models.liger import liger_knows
from openrlhf.models.load import read_config
from openrlhf.monitor import say


def explain_hardware(config: TrainingConfig, device: torch.device) -> None:
    """Lines about flags that the device or the families of the models leave without effect."""
    explain_precision(config.model.param_dtype, device)
    explain_offloading(config, device)
    if device.type == "cpu":
        for line in answers(config, ON_CPU):
            say(line)
    elif config.model.use_liger_kernel:
        for name in model_names(config):
            family = read_config(name, config.model).model_type
            if not liger_knows(family):
                say(f"--use_liger_kernel has no effect on {name}: Liger has no kernels for {family}")
    explain_experts(config.model, *model_names(config))


def model_names(config: TrainingConfig) -> list[str]:
    """Every model that a run loads, once."""
    names: list[str | None] = [config.model.pretrain]
    match config:
        case RLConfig():
            names += [critic_model(config), config.critic.ref_pretrain if uses_reference(config) else None]
            names += config.rewards.reward_models if config.rewards.scored_by_models else ()
        case DPOConfig(reference=reference) | KTOConfig(reference=reference):
            names.append(reference.ref_pretrain)
        case KDConfig(objective=objective):
            names.append(objective.teacher_model)
    return list(dict.fromkeys(name for name in names if name))


def explain_experts(loading: Loading, *names: str) -> None:
    """Says so when experts are to be computed in some way, but no model has any."""
    if loading.experts_implementation is None:
        return
    known = [read_config(name, loading).get_text_config().to_dict() for name in names]
    if not any("experts" in key for settings in known for key in settings):
        say(f"--experts_implementation {loading.experts_implementation} has no effect: no model has experts")


def explain_reward_models(config: RLConfig) -> None:
    """Flags for process reward models without one, and those for the others without any of them."""
    if not config.rewards.scored_by_models:
        return
    flags = config.rewards
    saved = [read_config(name, config.model).to_dict() for name in flags.reward_models]
    judges_steps = ["placeholder_token" in one for one in saved]
    if not any(judges_steps):
        for line in answers(config, WITHOUT_STEPS):
            say(line)
    if all(judges_steps):
        for line in answers(config, STEPS_ONLY):
            say(line)
