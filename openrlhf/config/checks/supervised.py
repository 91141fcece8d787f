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
    """A ring splits one long packed sequence; padded rows have no such split."""
    if config.sharding.ring_attn_size > 1 and not config.batches.packing_samples:
        raise ConfigError(
            f"--ring_attn_size {config.sharding.ring_attn_size} splits packed sequences", try_this="--packing_samples"
        )


def processes_fill_the_groups(config: SupervisedConfig) -> None:
    """Ring and tensor-parallel groups must cover all processes without a remainder."""
    ring, tensor = config.sharding.ring_attn_size, config.sharding.ds_tensor_parallel_size
    if world_size() % (ring * tensor):
        raise ConfigError(
            f"--ring_attn_size {ring} x --ds_tensor_parallel_size {tensor} does not divide {world_size()} processes",
            try_this=f"deepspeed --num_gpus {ring * tensor} ...",
        )


def micro_batches_divide_the_batch(config: SupervisedConfig) -> str | None:
    """A smaller last micro-batch is correct but wastes time, so report it instead of raising."""
    batch, micro = config.batches.train_batch_size, config.batches.micro_train_batch_size
    ranks = data_parallel_size(config)
    if batch % (micro * ranks):
        return (
            f"--train_batch_size {batch} is not a multiple of {micro} x {ranks} devices: the last micro-batch of each"
            " step is smaller"
        )
    return None


def multiturn_needs_a_chat_template(config: SFTConfig) -> None:
    """Only the chat template marks where the assistant's turns begin and end."""
    if config.fields.multiturn and not config.template.apply_chat_template:
        raise ConfigError("--multiturn needs the chat template to find the turns", try_this="--apply_chat_template")


def pretraining_has_no_turns(config: SFTConfig) -> None:
    """Plain text has no assistant turns to select."""
    if config.fields.pretrain_mode and config.fields.multiturn:
        raise ConfigError("--pretrain_mode trains on plain text, --multiturn on conversations: give one of them")


def margins_need_the_sigmoid_loss(config: RMConfig) -> None:
    """The log-exp loss has no margin term."""
    if config.objective.margin_loss and config.objective.loss != "sigmoid":
        raise ConfigError(f"--margin_loss does not apply to --loss {config.objective.loss}", try_this="--loss sigmoid")


def reward_tokens_differ(config: PRMConfig) -> None:
    """A single label, or the same one twice, gives every step the same target."""
    tokens = config.fields.reward_tokens
    if len(tokens) == 1 or len(set(tokens)) != len(tokens):
        raise ConfigError(f"--reward_tokens {' '.join(tokens)} cannot tell steps apart", try_this="--reward_tokens + -")
