"""Notices about flags that have no effect on this run's device or models.

A run prints them after reading the model configs and before loading any weights.
"""

from __future__ import annotations

import torch

from openrlhf.config.commands import DPOConfig, KDConfig, KTOConfig, RLConfig, TrainingConfig
from openrlhf.config.no_effect.lines import answers
from openrlhf.config.no_effect.table import ON_CPU, STEPS_ONLY, WITHOUT_STEPS
from openrlhf.config.runtime import critic_model, uses_reference
from openrlhf.config.sections.model import LoadingFlags
from openrlhf.models.liger import liger_knows
from openrlhf.models.load import read_config
from openrlhf.monitor import say
from openrlhf.training.device import explain_offloading, explain_precision


def explain_hardware(config: TrainingConfig, device: torch.device) -> None:
    """Name the flags that have no effect on this device or with these model families."""
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
    """Return the name of every model that the run loads, without duplicates."""
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


def explain_experts(loading: LoadingFlags, *names: str) -> None:
    """Say that --experts_implementation has no effect if no model has experts."""
    if loading.experts_implementation is None:
        return
    known = [read_config(name, loading).get_text_config().to_dict() for name in names]
    if not any("experts" in key for settings in known for key in settings):
        say(f"--experts_implementation {loading.experts_implementation} has no effect: no model has experts")


def explain_reward_models(config: RLConfig) -> None:
    """Name the flags that apply to process or outcome reward models when the run has none of that kind."""
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
