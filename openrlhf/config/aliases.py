"""Other spellings of our flags: older names, misprints in the documentation, and the dotted names of 0.10.2 and later.

`parser.parse_given` calls `rewrite` on the words of the command line and of YAML files before argparse sees them, so
that the parser, the help and the errors use one name per flag. A message tells the user about each old name. Dotted
names are equally good and need no message. Flags of older versions that no longer exist are in `retired`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openrlhf.config.flags import flags_of
from openrlhf.config.retired import CORRECTION, correction_words, retire, retired_names

# Old spelling -> the words that replace it. A message tells the user about the new spelling.
RENAMED: Mapping[str, tuple[str, ...]] = {
    "bf16": ("--param_dtype", "bf16"),
    "flash_attn": ("--attn_implementation", "flash_attention_2"),
    "use_icepop": ("--vllm_is_correction_type", "icepop"),
    "use_kl_estimator_k3": ("--kl_estimator", "k3"),
    "value_prefix_head": ("--value_head_prefix",),
    "wandb": ("--use_wandb",),
    "train_split": ("--dataset_split",),
    "rollout_micro_batch_size": ("--micro_rollout_batch_size",),
    "n_samples_per_prompts": ("--n_samples_per_prompt",),
    "vllm_enable_is_correction": ("--enable_vllm_is_correction",),
    "universal_ckpt": ("--use_ds_universal_ckpt",),
    "muon.no_nesterov": ("--muon_nesterov", "false"),
    "actor.muon.no_nesterov": ("--muon_nesterov", "false"),
    "critic.muon.no_nesterov": ("--critic_muon_nesterov", "false"),
}

# Values that have been renamed, by flag.
VALUES: Mapping[str, Mapping[str, str]] = {
    "vllm_is_correction_type": {"mis": "seq-mask-tis"},
    "loss_agg_mode": {"seq-mean-token-mean": "seq-mean"},
}

ENVIRONMENT: Mapping[str, str] = {
    "OPENRLHF_ASYNC_QUEUE_SIZE": "async_queue_size",
    "OPENRLHF_ASYNC_NUM_TASKS": "max_episodes_per_engine",
}

# Environment variable of an API key -> flags; the first one that the command has is used. A key on the command line
# would be visible to every user of the machine.
SECRETS: Mapping[str, tuple[str, ...]] = {"OPENRLHF_RM_API_KEY": ("api_key", "reward_api_key")}


def _same(prefix: str, *names: str) -> dict[str, tuple[str, ...]]:
    return {f"{prefix}.{name}": (name,) for name in names}


def _entity(role: str) -> dict[str, tuple[str, ...]]:
    """Map one network's dotted optimizer names to flags: the policy's have no prefix, the critic's have `critic_`."""
    own = "critic_" if role == "critic." else ""
    rate = {"": "learning_rate", "actor.": "actor_learning_rate", "critic.": "critic_learning_rate"}[role]
    names = {
        "adam.lr": rate,
        "adam.betas": f"{own}adam_betas",
        "adam.eps": f"{own}adam_eps",
        "adam.weight_decay": f"{own}l2",
        "optim": f"{own}optim",
        "muon.lr": f"{own}muon_lr",
        "muon.momentum": f"{own}muon_momentum",
        "muon.ns_steps": f"{own}muon_ns_steps",
        "muon.nesterov": f"{own}muon_nesterov",
        "lr_scheduler": f"{own}lr_scheduler",
        "lr_warmup_ratio": f"{own}lr_warmup_ratio",
        "min_lr_ratio": f"{own}min_lr_ratio",
        "max_norm": f"{own}max_norm",
        "gradient_checkpointing_enable": "gradient_checkpointing",
        "gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    }
    return {f"{role}{dotted}": (flat,) for dotted, flat in names.items()}


def _placement(role: str) -> dict[str, tuple[str, ...]]:
    return {f"{role}.{count}": (f"{role}_{count}",) for count in ("num_nodes", "num_gpus_per_node")}


# Dotted name -> flat names; the first one that the command has is used (`ref.offload` is two flags in two commands).
DOTTED: Mapping[str, tuple[str, ...]] = {
    **{f"{model}.model_name_or_path": ("pretrain",) for model in ("model", "actor")},
    "reward.model_name_or_path": ("reward_pretrain",),
    "critic.model_name_or_path": ("critic_pretrain",),
    "ref.model_name_or_path": ("ref_pretrain",),
    "teacher.model_name_or_path": ("teacher_model",),
    "reward.remote_url": ("remote_rm_url",),
    "ds.value_head_prefix": ("value_head_prefix",),
    **_placement("actor"),
    **_placement("critic"),
    **_placement("ref"),
    **_placement("reward"),
    "train.colocate_all": ("colocate_all_models",),
    **_same("train", "colocate_actor_ref", "colocate_critic_reward", "agent_func_path", "async_queue_size"),
    "ref.offload": ("ref_offload", "ref_reward_offload"),
    "reward.offload": ("ref_reward_offload",),
    "teacher.offload": ("teacher_offload",),
    **{
        f"vllm.{name}": (f"vllm_{name}",)
        for name in (
            "num_engines",
            "tensor_parallel_size",
            "sync_backend",
            "sync_with_ray",
            "enable_sleep",
            "gpu_memory_utilization",
        )
    },
    **_same("vllm", "enable_prefix_caching", "enforce_eager"),
    **_same(
        "ds",
        *("zero_stage", "param_dtype", "zpg", "adam_offload", "attn_implementation", "use_liger_kernel"),
        *("grad_accum_dtype", "overlap_comm", "deepcompile", "packing_samples", "load_in_4bit"),
        *("ring_attn_size", "experts_implementation"),
    ),
    "ds.tensor_parallel_size": ("ds_tensor_parallel_size",),
    "ds.ring_attn_head_stride": ("ring_head_stride",),
    "ds.lora.rank": ("lora_rank",),
    "ds.lora.alpha": ("lora_alpha",),
    "ds.lora.dropout": ("lora_dropout",),
    "ds.lora.target_modules": ("target_modules",),
    "ds.enable_sleep": ("deepspeed_enable_sleep",),
    "ds.use_universal_ckpt": ("use_ds_universal_ckpt",),
    "train.batch_size": ("train_batch_size",),
    "train.micro_batch_size": ("micro_train_batch_size",),
    **_same("train", "max_epochs", "num_episodes", "seed", "ema_beta", "enable_ema"),
    "train.full_determinism_enable": ("full_determinism",),
    "train.async_enable": ("async_train",),
    "train.partial_rollout_enable": ("partial_rollout",),
    "train.dynamic_batch_enable": ("use_dynamic_batch",),
    "train.max_tokens_per_gpu": ("train_max_tokens_per_gpu",),
    "rollout.batch_size": ("rollout_batch_size",),
    "rollout.micro_batch_size": ("micro_rollout_batch_size",),
    "rollout.max_tokens_per_gpu": ("rollout_max_tokens_per_gpu",),
    **_same("rollout", "n_samples_per_prompt", "temperature", "top_p", "max_new_tokens", "vllm_generate_batch_size"),
    "algo.advantage.estimator": ("advantage_estimator",),
    "algo.advantage.gamma": ("gamma",),
    "algo.advantage.lambd": ("lambd",),
    "algo.advantage.no_std_norm": ("no_advantage_std_norm",),
    "algo.advantage.is_correction_enable": ("enable_vllm_is_correction",),
    "algo.advantage.is_correction_threshold": ("vllm_is_truncated_threshold",),
    "algo.advantage.is_correction_type": ("vllm_is_correction_type",),
    "algo.kl.init_coef": ("init_kl_coef",),
    "algo.kl.target": ("kl_target",),
    "algo.kl.horizon": ("kl_horizon",),
    "algo.kl.estimator": ("kl_estimator",),
    "algo.kl.use_loss": ("use_kl_loss",),
    "algo.kl.unbiased_gradient": ("kl_unbiased_gradient",),
    "algo.dynamic_filtering_enable": ("dynamic_filtering",),
    "algo.dynamic_filtering_range": ("dynamic_filtering_reward_range",),
    **_same("actor", "eps_clip", "eps_clip_low_high", "dual_clip", "policy_loss_type", "aux_loss_coef"),
    **_same("actor", "loss_agg_mode"),
    "actor.entropy_coef": ("entropy_loss_coef",),
    **_same("critic", "value_clip", "save_value_network"),
    "critic.freezing_steps": ("freezing_actor_steps",),
    "reward.normalize_enable": ("normalize_reward",),
    "reward.clip_range": ("reward_clip_range",),
    **_same("reward", "overlong_buffer_len", "overlong_penalty_factor", "stop_properly_penalty_coef"),
    **_entity(""),
    **_entity("actor."),
    **_entity("critic."),
    "model.gradient_checkpointing_enable": ("gradient_checkpointing",),
    "model.gradient_checkpointing_reentrant": ("gradient_checkpointing_use_reentrant",),
    **_same("data", "dataset", "dataset_probs", "dataset_split", "prompt_split", "max_len", "max_samples"),
    **_same("data", "input_key", "output_key", "label_key", "prompt_key", "chosen_key", "rejected_key"),
    **_same("data", "input_template", "apply_chat_template", "tokenizer_chat_template", "multiturn"),
    **_same("data", "disable_fast_tokenizer", "dataloader_num_workers"),
    "data.prompt_dataset": ("prompt_data",),
    "data.prompt_probs": ("prompt_data_probs",),
    "data.prompt_dataset_probs": ("prompt_data_probs",),
    **{f"eval.{name}": (f"eval_{name}",) for name in ("dataset", "steps", "split", "temperature")},
    "eval.n_samples_per_prompt": ("eval_n_samples_per_prompt",),
    "ckpt.output_dir": ("save_path",),
    "ckpt.path": ("ckpt_path",),
    "ckpt.save_steps": ("save_steps",),
    "ckpt.save_hf": ("save_hf_ckpt",),
    "ckpt.disable_ds": ("disable_ds_ckpt",),
    "ckpt.max_num": ("max_ckpt_num",),
    "ckpt.max_mem": ("max_ckpt_mem",),
    "ckpt.load_enable": ("load_checkpoint",),
    "ckpt.best_metric_key": ("best_metric_key",),
    "logger.wandb.key": ("use_wandb",),
    **{f"logger.wandb.{name}": (f"wandb_{name}",) for name in ("org", "group", "project", "run_name")},
    "logger.tensorboard_dir": ("use_tensorboard",),
    "logger.logging_steps": ("logging_steps",),
    "model.ipo_enable": ("ipo",),
    **_same("model", "beta", "label_smoothing", "nll_loss_coef", "kd_coef", "aux_loss_coef"),
    "model.loss_type": ("loss",),
    "model.margin_loss_enable": ("margin_loss",),
    "model.compute_fp32_loss_enable": ("compute_fp32_loss",),
    "model.pretrain_mode_enable": ("pretrain_mode",),
}


def known_spellings(command: type) -> list[str]:
    """List every spelling that a command accepts, current names first."""
    flags = flags_of(command)
    renamed = [old for old, words in RENAMED.items() if words[0].removeprefix("--") in flags]
    dotted = [name for name, flat in DOTTED.items() if any(target in flags for target in flat)]
    return list(dict.fromkeys([*flags, *renamed, *dotted, *retired_names(flags)]))


def rewrite(command: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Rewrite `argv` to current spellings; also return one message per old spelling found."""
    flags = flags_of(command)
    words: list[str] = []
    notes: list[str] = []
    correction: dict[str, str] = {}
    for item in arguments(argv):
        name, given = item.name, item.words
        flat = next((target for target in DOTTED.get(name, ()) if target in flags), None)
        if name in flags:
            words += given
        elif name in RENAMED and RENAMED[name][0].removeprefix("--") in flags:
            became = replacement(RENAMED[name], given)
            words += became
            notes += [f"--{name} is now {' '.join(RENAMED[name])}"] if became else []
        elif name in CORRECTION and CORRECTION[name] in flags:
            correction[name] = item.value
        elif name in retired_names(flags):
            notes.append(retire(name, item.value))
        elif flat is not None:
            words += [given[0].replace(name, flat, 1), *given[1:]]
        else:
            words += given
    words, renamed = with_values(words + correction_words(correction))
    return words, list(dict.fromkeys(notes + renamed))


@dataclass
class Argument:
    """A flag on a command line with the words that follow it, up to the next flag."""

    name: str  # without dashes; empty for words before the first flag
    value: str  # as one text
    words: list[str]  # as given, the flag first


def arguments(argv: Sequence[str]) -> list[Argument]:
    """Group the words of a command line by flag."""
    found: list[Argument] = []
    for word in argv:
        if word.startswith("--") or not found:
            name, _, value = word.removeprefix("--").partition("=")
            found.append(Argument(name if word.startswith("--") else "", value, [word]))
        else:
            last = found[-1]
            last.value = f"{last.value} {word}".strip()
            last.words.append(word)
    return found


def replacement(became: Sequence[str], given: Sequence[str]) -> list[str]:
    """Replace `--old`, `--old=value` or `--old value`; switches from a file have the form `=true` or `=false`."""
    _, equals, value = given[0].partition("=")
    if len(became) == 1:
        return [became[0] + equals + value, *given[1:]]
    is_off = value.lower() in ("false", "no", "off", "0")
    return [] if is_off else [*became, *given[1:]]


def with_values(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate flag values of other versions; also return one message for each."""
    made: list[str] = []
    notes: list[str] = []
    for item in arguments(words):
        new = VALUES.get(item.name, {}).get(item.value)
        made += item.words if new is None else [f"--{item.name}={new}"]
        notes += [] if new is None else [f"--{item.name} {item.value} is now {new}"]
    return made, notes


def environment_arguments(command: type, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Turn environment variables into arguments, which flags may override; also return a message per old variable."""
    flags = flags_of(command)
    old = [(key, name) for key, name in ENVIRONMENT.items() if key in environ and name in flags]
    keys = [(key, name) for key, names in SECRETS.items() if key in environ for name in names if name in flags]
    return [f"--{name}={environ[key]}" for key, name in [*old, *keys]], [f"{key} is now --{name}" for key, name in old]
