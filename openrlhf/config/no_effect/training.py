"""Flags of all commands, and of training, that have no effect in some runs; see `lines`."""

from typing import get_args

from openrlhf.config.checks.paths import DATA_FLAGS, MODEL_FLAGS, is_here, named_by
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import (
    BatchInferenceConfig,
    DPOConfig,
    KDConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
    Templated,
    TrainingConfig,
)
from openrlhf.config.no_effect.lines import always, rows
from openrlhf.config.runtime import num_devices, resolve_runtime, used_roles, uses_critic


def in_one_process(config: TrainingConfig) -> bool:
    """Return True if no model is spread over processes and no universal checkpoint requires DeepSpeed anyway."""
    if config.checkpoints.use_ds_universal_ckpt or world_size() > 1:
        return False
    if not isinstance(config, RLConfig) or resolve_runtime(config) == "local":
        return True
    return max(num_devices(config, role) for role in used_roles(config)) == 1


def without_muon(config: TrainingConfig) -> bool:
    own = isinstance(config, RLConfig) and uses_critic(config) and config.optimizer.critic_optim == "muon"
    return config.optimizer.optim != "muon" and not own


def schedulers(config: TrainingConfig) -> set[str]:
    """Return the schedulers that may use --min_lr_ratio and --lr_warmup_ratio: the policy's, and a critic's own."""
    names = {config.optimizer.lr_scheduler}
    if isinstance(config, RLConfig) and uses_critic(config) and config.optimizer.critic_lr_scheduler:
        names.add(config.optimizer.critic_lr_scheduler)
    return names


def never_evaluated(config: TrainingConfig) -> bool:
    """Return True without evaluation data; train_rm then evaluates on training rows."""
    if isinstance(config, RLConfig):
        return config.prompts.eval_dataset is None
    return (
        isinstance(config, SupervisedConfig) and not isinstance(config, RMConfig) and config.data.eval_dataset is None
    )


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
        ("vllm_sync_with_ray", "because weights never travel through Ray here", always),
        ("use_ms", "because every model and dataset is on this machine", everything_is_here),
    ),
    *rows(BatchInferenceConfig, ("zero_stage", "because each process holds the whole model", always)),
)


TRAINING = (
    *rows(
        TrainingConfig,
        ("zero_stage zpg overlap_comm grad_accum_dtype", "in one process", in_one_process),
        ("ring_head_stride", "without --ring_attn_size", lambda c: c.sharding.ring_attn_size == 1),
        (
            "wandb_run_name",
            "without --use_wandb or --use_tensorboard",
            lambda c: not (c.logs.use_wandb or c.logs.use_tensorboard),
        ),
        ("muon_lr muon_momentum muon_ns_steps muon_nesterov", "without --optim muon", without_muon),
        (
            "min_lr_ratio",
            "without an --lr_scheduler that has a minimum learning rate, such as cosine_with_min_lr",
            lambda c: not any("min_lr" in name for name in schedulers(c)),
        ),
        (
            "lr_warmup_ratio",
            "with --lr_scheduler constant; constant_with_warmup has a warm-up",
            lambda c: schedulers(c) == {"constant"} and c.optimizer.lr_warmup_ratio > 0,
        ),
        ("eval_steps", "without --eval_dataset", never_evaluated),
    ),
    *rows(DPOConfig, ("label_smoothing", "with --ipo", lambda c: c.objective.ipo)),
)


TEMPLATES = (
    *rows(
        (SFTConfig, KDConfig),
        (
            f"output_key apply_chat_template input_template {CHAT_TEMPLATE}",
            "with --pretrain_mode",
            lambda c: c.fields.pretrain_mode,
        ),
    ),
    *rows(
        get_args(Templated),
        (CHAT_TEMPLATE, "without --apply_chat_template", plain_text),
        ("input_template", "with --apply_chat_template", lambda c: c.template.apply_chat_template),
    ),
)
