"""Rules of the six commands that train on a dataset."""

import os

from openrlhf.config.commands import PRMConfig, RMConfig, SFTConfig, SupervisedConfig
from openrlhf.errors import ConfigError


def world_size() -> int:
    """Return the number of processes that a launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def data_parallel_size(config: SupervisedConfig) -> int:
    """Return the number of processes that train on different rows."""
    return world_size() // (config.sharding.ring_attn_size * config.sharding.ds_tensor_parallel_size)


def ring_attention_needs_packing(config: SupervisedConfig) -> None:
    """Require packing with ring attention, which splits packed sequences and cannot split padded rows."""
    if config.sharding.ring_attn_size > 1 and not config.batches.packing_samples:
        raise ConfigError(
            f"--ring_attn_size {config.sharding.ring_attn_size} splits packed sequences, but packing is off",
            try_this="--packing_samples",
        )


def processes_fill_the_groups(config: SupervisedConfig) -> None:
    """Require that ring and tensor-parallel groups divide the number of processes."""
    ring, tensor = config.sharding.ring_attn_size, config.sharding.ds_tensor_parallel_size
    if world_size() % (ring * tensor):
        raise ConfigError(
            f"--ring_attn_size {ring} x --ds_tensor_parallel_size {tensor} does not divide the number of "
            f"processes ({world_size()})",
            try_this=f"deepspeed --num_gpus {ring * tensor} ...",
        )


def micro_batches_divide_the_batch(config: SupervisedConfig) -> str | None:
    """Warn about a smaller last micro-batch, which is correct but wastes time."""
    batch, micro = config.batches.train_batch_size, config.batches.micro_train_batch_size
    ranks = data_parallel_size(config)
    if batch % (micro * ranks):
        return (
            f"--train_batch_size {batch} is not a multiple of {micro} x {ranks} devices: the last micro-batch of each"
            " step is smaller"
        )
    return None


def multiturn_needs_a_chat_template(config: SFTConfig) -> None:
    """Require a chat template for --multiturn, because only it marks where assistant turns begin and end."""
    if config.fields.multiturn and not config.template.apply_chat_template:
        raise ConfigError("--multiturn needs the chat template to find the turns", try_this="--apply_chat_template")


def pretraining_has_no_turns(config: SFTConfig) -> None:
    """Reject --multiturn with --pretrain_mode, because plain text has no assistant turns."""
    if config.fields.pretrain_mode and config.fields.multiturn:
        raise ConfigError("--pretrain_mode trains on plain text, --multiturn on conversations; give only one of them")


def margins_need_the_sigmoid_loss(config: RMConfig) -> None:
    """Reject margins with the log-exp loss, which has no margin term."""
    if config.objective.margin_loss and config.objective.loss != "sigmoid":
        raise ConfigError(f"--margin_loss does not apply to --loss {config.objective.loss}", try_this="--loss sigmoid")


def reward_tokens_differ(config: PRMConfig) -> None:
    """Reject a single label or repeated labels, which cannot distinguish steps."""
    tokens = config.fields.reward_tokens
    if len(tokens) == 1 or len(set(tokens)) != len(tokens):
        raise ConfigError(
            f"--reward_tokens {' '.join(tokens)} cannot distinguish steps: expected at least two different tokens",
            try_this="--reward_tokens + -",
        )
