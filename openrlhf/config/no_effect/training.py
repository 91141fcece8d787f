"""Flags of all commands, and of training, that have no effect in some runs; see `lines`."""

from typing import get_args

from openrlhf.config import commands
from openrlhf.config.checks.paths import DATA_FLAGS, MODEL_FLAGS, is_here, named_by
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import RLConfig, Templated, TrainingConfig
from openrlhf.config.flags import flag_values
from openrlhf.config.no_effect.lines import always, rows
from openrlhf.config.runtime import (
    backend_of,
    num_devices,
    reference_is_base,
    resolve_runtime,
    used_roles,
    uses_critic,
)
from openrlhf.config.sections.training import OptimizerFlags


def trains_locally(config: TrainingConfig) -> bool:
    """Return True if plain PyTorch trains: each model has one process, and the flags choose no other backend."""
    processes = world_size()
    if isinstance(config, RLConfig) and resolve_runtime(config) != "local":
        processes = max(processes, *(num_devices(config, role) for role in used_roles(config)))
    return backend_of(config, processes) == "local"


def uses_fsdp(config: TrainingConfig) -> bool:
    return config.sharding.backend == "fsdp"


def optimizers(config: TrainingConfig) -> list[OptimizerFlags]:
    """Return the optimizer flags of the trained model or policy and, if there is one, of the critic."""
    critic = [config.optimizer.critic] if isinstance(config, RLConfig) and uses_critic(config) else []
    return [config.optimizer, *critic]


def schedulers(config: TrainingConfig) -> set[str]:
    return {item.lr_scheduler for item in optimizers(config)}


def evaluates(config: TrainingConfig) -> bool:
    values = flag_values(config)
    return values["eval_dataset"] is not None or values["eval_size"] is not None


def everything_is_here(config: object) -> bool:
    return all(is_here(item) for _, item in named_by(config, (*MODEL_FLAGS, *DATA_FLAGS)))


def plain_text(config: Templated) -> bool:
    """Return True if no chat template is used: only --apply_chat_template and agents that send messages use one."""
    agent = isinstance(config, RLConfig) and config.rewards.agent_func_path
    return not (agent or config.template.apply_chat_template)


CHAT_TEMPLATE = "tokenizer_chat_template system_prompt chat_template_kwargs"


ALWAYS = (
    *rows(
        object,
        ("dataloader_num_workers", "because rows are prepared before training starts", always),
        ("disable_fast_tokenizer", "because Transformers has only fast tokenizers", always),
        ("compute_fp32_loss", "because rewards are always in fp32 before the loss", always),
        ("vllm_sync_with_ray", "because weights are never sent through Ray", always),
        ("use_ms", "because every model and dataset is on this machine", everything_is_here),
    ),
    *rows(commands.BatchInferenceConfig, ("zero_stage", "because each process holds the whole model", always)),
)


TRAINING = (
    *rows(
        TrainingConfig,
        ("zero_stage zpg overlap_comm grad_accum_dtype", "in one process", trains_locally),
        (
            "zero_stage zpg",
            "with --backend fsdp, which shards weights, gradients and optimizer states over all devices",
            uses_fsdp,
        ),
        ("overlap_comm", "with --backend fsdp, which always overlaps", uses_fsdp),
        ("grad_accum_dtype", "with --backend fsdp, which sums gradients in fp32", uses_fsdp),
        (
            "use_ds_universal_ckpt",
            "with --backend fsdp, whose checkpoints resume on any number of devices",
            uses_fsdp,
        ),
        ("ring_head_stride", "without --ring_attn_size", lambda c: c.sharding.ring_attn_size == 1),
        (
            "wandb_run_name",
            "without --use_wandb, --use_tensorboard or --use_trackio",
            lambda c: not (c.logs.use_wandb or c.logs.use_tensorboard or c.logs.use_trackio),
        ),
        (
            "muon_lr muon_momentum muon_ns_steps muon_nesterov",
            "without --optim muon",
            lambda c: all(item.optim != "muon" for item in optimizers(c)),
        ),
        (
            "min_lr_ratio",
            "without an --lr_scheduler that has a minimum learning rate, such as cosine_with_min_lr",
            lambda c: not any("min_lr" in name for name in schedulers(c)),
        ),
        (
            "lr_warmup_ratio",
            "with --lr_scheduler constant; use constant_with_warmup for a warm-up",
            lambda c: schedulers(c) == {"constant"} and c.optimizer.lr_warmup_ratio > 0,
        ),
        (  # train_rm evaluates on training rows by default
            "eval_steps",
            "without --eval_dataset or --eval_size",
            lambda c: not evaluates(c) and not isinstance(c, commands.RMConfig),
        ),
    ),
    *rows(
        (commands.DPOConfig, commands.KTOConfig),
        ("ref_offload", "with LoRA: the reference is the policy without its adapters", reference_is_base),
    ),
    *rows(commands.DPOConfig, ("label_smoothing", "with --ipo", lambda c: c.objective.ipo)),
    *rows(
        (commands.SFTConfig, commands.KDConfig),
        (
            f"output_key apply_chat_template input_template system_key {CHAT_TEMPLATE}",
            "with --pretrain_mode",
            lambda c: c.fields.pretrain_mode,
        ),
    ),
    *rows(
        get_args(Templated),
        (CHAT_TEMPLATE, "without --apply_chat_template", plain_text),
        ("system_key", "without --apply_chat_template", lambda c: not c.template.apply_chat_template),
        ("input_template", "with --apply_chat_template", lambda c: c.template.apply_chat_template),
    ),
)
