"""Flags of all commands, and of training, that have no effect in some runs; see `lines`."""

from openrlhf.config.checks.common import Templated
from openrlhf.config.checks.paths import DATA_FLAGS, MODEL_FLAGS, is_here, named_by
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import (
    BatchInferenceConfig,
    ChatConfig,
    DPOConfig,
    KDConfig,
    KTOConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
    TrainingConfig,
)
from openrlhf.config.no_effect.lines import idle
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


def never_evaluated(config: RLConfig | SupervisedConfig) -> bool:
    data = config.prompts if isinstance(config, RLConfig) else config.data
    return data.eval_dataset is None


def everything_is_here(config: object) -> bool:
    return all(is_here(item) for _, item in named_by(config, (*MODEL_FLAGS, *DATA_FLAGS)))


def plain_text(config: Templated) -> bool:
    """Return True if no chat template is used: only --apply_chat_template and agents that send messages use one."""
    agent = isinstance(config, RLConfig) and config.rewards.agent_func_path
    return not (agent or config.template.apply_chat_template)


TEMPLATED = (SFTConfig, RMConfig, DPOConfig, KTOConfig, KDConfig, RLConfig, BatchInferenceConfig, ChatConfig)
CHAT_TEMPLATE = "tokenizer_chat_template system_prompt chat_template_kwargs"


ALWAYS = (
    idle("dataloader_num_workers", "because rows are prepared before training starts"),
    idle("disable_fast_tokenizer", "because Transformers has only fast tokenizers"),
    idle("compute_fp32_loss", "because rewards are always in fp32 before the loss"),
    idle("vllm_sync_with_ray", "because weights never travel through Ray here"),
    idle("zero_stage", "because each process holds the whole model", BatchInferenceConfig),
    idle("use_ms", "because every model and dataset is on this machine", when=everything_is_here),
)


TRAINING = (
    idle("zero_stage zpg overlap_comm grad_accum_dtype", "in one process", TrainingConfig, in_one_process),
    idle("ring_head_stride", "without --ring_attn_size", TrainingConfig, lambda c: c.sharding.ring_attn_size == 1),
    idle(
        "wandb_run_name",
        "without --use_wandb or --use_tensorboard",
        TrainingConfig,
        lambda c: not (c.logs.use_wandb or c.logs.use_tensorboard),
    ),
    idle("muon_lr muon_momentum muon_ns_steps muon_nesterov", "without --optim muon", TrainingConfig, without_muon),
    idle(
        "min_lr_ratio",
        "without an --lr_scheduler that has a least learning rate, such as cosine_with_min_lr",
        TrainingConfig,
        lambda c: not any("min_lr" in name for name in schedulers(c)),
    ),
    idle(
        "lr_warmup_ratio",
        "with --lr_scheduler constant; constant_with_warmup has a warm-up",
        TrainingConfig,
        lambda c: schedulers(c) == {"constant"} and c.optimizer.lr_warmup_ratio > 0,
    ),
    idle(
        "eval_steps",
        "without --eval_dataset",
        TrainingConfig,
        lambda c: never_evaluated(c) and not isinstance(c, RMConfig),  # train_rm evaluates on training rows
    ),
    idle("label_smoothing", "with --ipo", DPOConfig, lambda c: c.objective.ipo),
)


TEMPLATES = (
    idle(
        f"output_key apply_chat_template input_template {CHAT_TEMPLATE}",
        "with --pretrain_mode",
        (SFTConfig, KDConfig),
        lambda c: c.fields.pretrain_mode,
    ),
    idle(CHAT_TEMPLATE, "without --apply_chat_template", TEMPLATED, plain_text),
    idle("input_template", "with --apply_chat_template", TEMPLATED, lambda c: c.template.apply_chat_template),
)
