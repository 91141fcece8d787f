"""Valid ranges of numeric flags, regardless of other flags."""

from collections.abc import Callable, Mapping

from openrlhf.config.flags import flag_values
from openrlhf.errors import ConfigError

Range = tuple[str, Callable[[float], bool]]

POSITIVE: Range = ("above 0", lambda value: value > 0)
NOT_NEGATIVE: Range = ("0 or more", lambda value: value >= 0)
SHARE: Range = ("between 0 and 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE: Range = ("above 0 and at most 1", lambda value: 0 < value <= 1)
BELOW_ONE: Range = ("0 or more and below 1", lambda value: 0 <= value < 1)
POSITIVE_OR_MINUS_ONE: Range = ("above 0, or -1", lambda value: value > 0 or value == -1)

RANGES: Mapping[str, Range] = {
    **dict.fromkeys(
        (
            *("train_batch_size", "micro_train_batch_size", "max_epochs", "max_steps", "max_samples", "max_len"),
            *("rollout_batch_size", "micro_rollout_batch_size", "n_samples_per_prompt", "num_episodes"),
            *("prompt_max_len", "generate_max_len", "max_new_tokens", "eval_n_samples_per_prompt"),
            *("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu", "vllm_generate_batch_size", "min_new_tokens"),
            *("actor_num_nodes", "ref_num_nodes", "critic_num_nodes", "reward_num_nodes"),
            *("actor_num_gpus_per_node", "ref_num_gpus_per_node", "critic_num_gpus_per_node"),
            *("reward_num_gpus_per_node", "vllm_tensor_parallel_size", "ds_tensor_parallel_size"),
            *("ring_attn_size", "ring_head_stride", "zpg", "logging_steps", "max_ckpt_num", "lora_alpha"),
            *("beta", "reward_timeout", "max_turns", "max_concurrent_episodes", "max_episodes_per_engine"),
            *("kl_horizon", "kl_target"),
            *("best_of_n", "micro_batch_size", "tp_size", "max_num_seqs", "batch_size", "batch_tokens", "max_ckpt_mem"),
            *("overlong_buffer_len", "value_clip", "adam_eps", "muon_ns_steps", "repetition_penalty"),
            *("critic_adam_eps", "max_request_mb"),
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        (
            *("learning_rate", "actor_learning_rate", "critic_learning_rate", "muon_lr", "l2", "max_norm"),
            *(
                "lora_rank",
                "aux_loss_coef",
                "init_kl_coef",
                "nll_loss_coef",
                "eps_clip",
                "temperature",
                "eval_temperature",
            ),
            *("desirable_loss_weight", "undesirable_loss_weight", "dataloader_num_workers", "entropy_loss_coef"),
            *("async_queue_size", "vllm_num_engines", "overlong_penalty_factor", "iter"),
            *("max_restarts", "sync_check_every"),
            *("critic_l2", "critic_max_norm", "critic_muon_lr"),
        ),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        (
            *("gamma", "lambd", "kd_coef", "lr_warmup_ratio", "min_lr_ratio", "min_p"),
            *("critic_lr_warmup_ratio", "critic_min_lr_ratio"),
        ),
        SHARE,
    ),
    **dict.fromkeys(("top_p", "vllm_gpu_memory_utilization"), POSITIVE_SHARE),
    **dict.fromkeys(
        ("lora_dropout", "ema_beta", "muon_momentum", "critic_muon_momentum", "adam_betas", "critic_adam_betas"),
        BELOW_ONE,
    ),
    **dict.fromkeys(("save_steps", "eval_steps", "top_k"), POSITIVE_OR_MINUS_ONE),
    "port": ("above 0 and at most 65535", lambda value: 0 < value <= 65535),
    "label_smoothing": ("between 0 and 0.5", lambda value: 0 <= value <= 0.5),
    "zero_stage": ("0, 1, 2 or 3", lambda value: value in (0, 1, 2, 3)),
    "dual_clip": ("above 1", lambda value: value > 1),
    "stop_properly_penalty_coef": ("at most 1", lambda value: value <= 1),
}


def numbers_are_in_range(config: object) -> None:
    for name, value in flag_values(config).items():
        if name not in RANGES or value is None:
            continue
        wanted, holds = RANGES[name]
        for number in value if isinstance(value, tuple) else (value,):
            assert isinstance(number, int | float), f"--{name} is no number"
            if not holds(number):
                raise ConfigError(f"--{name} is {number}, but must be {wanted}")
