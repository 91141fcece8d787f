"""Other spellings of flags: old names, misprints in upstream documentation, and the dotted names of 0.10.2 and later.

`parser.parse_given` calls `rewrite` on the words of the command line and of YAML files before argparse parses them, so
that the parser, the help and the errors use one name per flag. A message reports each old name; dotted names are
current and need no message. Flags of older versions that no longer exist are in `retired`.
"""

from collections.abc import Collection, Mapping, Sequence

from openrlhf.config.flags import flags_of
from openrlhf.config.retired import CORRECTION, correction_words, retire, retired_names

FALSE = ("false", "no", "off", "0")

# Old name -> the flag that replaces it, followed by a value if the old name implies one. A message reports each use.
RENAMED: Mapping[str, str] = {
    "bf16": "param_dtype bf16",
    "flash_attn": "attn_implementation flash_attention_2",
    "use_icepop": "vllm_is_correction_type icepop",
    "use_kl_estimator_k3": "kl_estimator k3",
    "value_prefix_head": "value_head_prefix",
    "wandb": "use_wandb",
    "train_split": "dataset_split",
    "rollout_micro_batch_size": "micro_rollout_batch_size",
    "n_samples_per_prompts": "n_samples_per_prompt",
    "vllm_enable_is_correction": "enable_vllm_is_correction",
    "universal_ckpt": "use_ds_universal_ckpt",
    "muon.no_nesterov": "muon_nesterov false",
    "actor.muon.no_nesterov": "muon_nesterov false",
    "critic.muon.no_nesterov": "critic_muon_nesterov false",
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


def _names(prefix: str, *words: str, own: str = "") -> dict[str, tuple[str, ...]]:
    """Parse `dotted=flat` words, or single words if both names are equal; `own` is the prefix of the flat names."""
    pairs = [word.split("=") for line in words for word in line.split()]
    return {f"{prefix}{pair[0]}": tuple(f"{own}{flat}" for flat in pair[-1].split("/")) for pair in pairs}


OPTIMIZER = (
    "adam.betas=adam_betas adam.eps=adam_eps adam.weight_decay=l2 optim muon.lr=muon_lr muon.momentum=muon_momentum"
    " muon.ns_steps=muon_ns_steps muon.nesterov=muon_nesterov lr_scheduler lr_warmup_ratio min_lr_ratio max_norm"
)
RECOMPUTATION = (
    "gradient_checkpointing_enable=gradient_checkpointing"
    " gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant"
)
DEVICES = "num_nodes num_gpus_per_node"

# Dotted name -> flat names; the first one that the command has is used (`ref.offload` depends on the command).
DOTTED: Mapping[str, tuple[str, ...]] = {
    **_names("", "adam.lr=learning_rate", OPTIMIZER, RECOMPUTATION),
    **_names("actor.", "adam.lr=actor_learning_rate", OPTIMIZER, RECOMPUTATION),
    **_names("critic.", "adam.lr=learning_rate", OPTIMIZER, own="critic_"),
    **_names("critic.", RECOMPUTATION),
    **_names("model.", "model_name_or_path=pretrain", RECOMPUTATION),
    **_names("model.", "beta label_smoothing nll_loss_coef kd_coef aux_loss_coef ipo_enable=ipo loss_type=loss"),
    **_names("model.", "margin_loss_enable=margin_loss compute_fp32_loss_enable=compute_fp32_loss"),
    **_names("model.", "pretrain_mode_enable=pretrain_mode"),
    **_names("actor.", "model_name_or_path=pretrain eps_clip eps_clip_low_high dual_clip policy_loss_type"),
    **_names("actor.", "aux_loss_coef loss_agg_mode entropy_coef=entropy_loss_coef"),
    **_names("critic.", "value_clip save_value_network freezing_steps=freezing_actor_steps"),
    **_names("critic.", "model_name_or_path=critic_pretrain"),
    **_names("reward.", "model_name_or_path=reward_pretrain remote_url=remote_rm_url offload=ref_reward_offload"),
    **_names("reward.", "normalize_enable=normalize_reward clip_range=reward_clip_range"),
    **_names("reward.", "overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef"),
    **_names("ref.", "model_name_or_path=ref_pretrain offload=ref_offload/ref_reward_offload"),
    **_names("teacher.", "model_name_or_path=teacher_model offload=teacher_offload"),
    **_names("actor.", DEVICES, own="actor_"),
    **_names("critic.", DEVICES, own="critic_"),
    **_names("ref.", DEVICES, own="ref_"),
    **_names("reward.", DEVICES, own="reward_"),
    **_names("vllm.", "num_engines tensor_parallel_size sync_backend sync_with_ray enable_sleep", own="vllm_"),
    **_names("vllm.", "pipeline_parallel_size enable_expert_parallel", own="vllm_"),
    **_names("vllm.", "gpu_memory_utilization=vllm_gpu_memory_utilization enable_prefix_caching enforce_eager"),
    **_names("ds.", "zero_stage param_dtype zpg adam_offload attn_implementation use_liger_kernel grad_accum_dtype"),
    **_names("ds.", "overlap_comm deepcompile packing_samples load_in_4bit ring_attn_size experts_implementation"),
    **_names("ds.", "tensor_parallel_size=ds_tensor_parallel_size ring_attn_head_stride=ring_head_stride"),
    **_names("ds.", "enable_sleep=deepspeed_enable_sleep use_universal_ckpt=use_ds_universal_ckpt value_head_prefix"),
    **_names("ds.lora.", "rank=lora_rank alpha=lora_alpha dropout=lora_dropout target_modules"),
    **_names("train.", "batch_size=train_batch_size micro_batch_size=micro_train_batch_size max_epochs num_episodes"),
    **_names("train.", "seed ema_beta enable_ema full_determinism_enable=full_determinism async_enable=async_train"),
    **_names("train.", "async_queue_size partial_rollout_enable=partial_rollout agent_func_path"),
    **_names("train.", "dynamic_batch_enable=use_dynamic_batch max_tokens_per_gpu=train_max_tokens_per_gpu"),
    **_names("train.", "colocate_all=colocate_all_models colocate_actor_ref colocate_critic_reward"),
    **_names("rollout.", "batch_size=rollout_batch_size micro_batch_size=micro_rollout_batch_size"),
    **_names("rollout.", "max_tokens_per_gpu=rollout_max_tokens_per_gpu"),
    **_names("rollout.", "n_samples_per_prompt temperature top_p max_new_tokens vllm_generate_batch_size"),
    **_names("algo.advantage.", "estimator=advantage_estimator gamma lambd no_std_norm=no_advantage_std_norm"),
    **_names("algo.advantage.", "is_correction_enable=enable_vllm_is_correction"),
    **_names("algo.advantage.", "is_correction_threshold=vllm_is_truncated_threshold"),
    **_names("algo.advantage.", "is_correction_type=vllm_is_correction_type"),
    **_names("algo.kl.", "init_coef=init_kl_coef target=kl_target horizon=kl_horizon estimator=kl_estimator"),
    **_names("algo.kl.", "use_loss=use_kl_loss unbiased_gradient=kl_unbiased_gradient"),
    **_names("algo.dynamic_filtering_", "enable=dynamic_filtering range=dynamic_filtering_reward_range"),
    **_names("data.", "dataset dataset_probs dataset_split prompt_split max_len max_samples input_key output_key"),
    **_names("data.", "label_key prompt_key chosen_key rejected_key input_template apply_chat_template multiturn"),
    **_names("data.", "tokenizer_chat_template disable_fast_tokenizer dataloader_num_workers"),
    **_names("data.prompt_", "dataset=prompt_data probs=prompt_data_probs dataset_probs=prompt_data_probs"),
    **_names("eval.", "dataset steps split temperature n_samples_per_prompt", own="eval_"),
    **_names("ckpt.", "output_dir=save_path path=ckpt_path save_steps save_hf=save_hf_ckpt disable_ds=disable_ds_ckpt"),
    **_names("ckpt.", "max_num=max_ckpt_num max_mem=max_ckpt_mem load_enable=load_checkpoint best_metric_key"),
    **_names("logger.", "wandb.key=use_wandb tensorboard_dir=use_tensorboard logging_steps"),
    **_names("logger.wandb.", "org group project run_name", own="wandb_"),
}


def known_spellings(command: type) -> list[str]:
    """List every spelling that a command accepts, current names first."""
    flags = flags_of(command)
    old = [name for name in (*RENAMED, *DOTTED) if successor(name, flags)]
    current = [name for name, item in flags.items() if not item.positional]
    return list(dict.fromkeys([*current, *old, *retired_names(flags)]))


def successor(name: str, flags: Collection[str]) -> list[str]:
    """Return the current flag for a spelling, followed by its implied value, if any; empty for an unknown spelling."""
    known = [RENAMED[name].split()] if name in RENAMED else [[flat] for flat in (name, *DOTTED.get(name, ()))]
    return next((words for words in known if words[0] in flags), [])


def rewrite(command: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Rewrite `argv` to current spellings; also return one message per old spelling or value found."""
    flags = flags_of(command)
    words: list[str] = []
    notes: list[str] = []
    correction: dict[str, str] = {}
    for given in grouped(argv):
        name, equals, attached = given[0].partition("=")
        name, value = name.removeprefix("--"), " ".join([attached, *given[1:]]).strip()
        became = successor(name, flags)
        if not given[0].startswith("--"):
            words += given
        elif became:
            flag, *implied = became
            if implied and attached.lower() in FALSE:  # an old switch set to false in a YAML file
                continue
            new = VALUES.get(flag, {}).get(value)
            if name in RENAMED:
                notes.append(f"--{name} is now --{RENAMED[name]}")
            if new is not None:
                notes.append(f"--{flag} {value} is now {new}")
                words.append(f"--{flag}={new}")
            else:
                words += [f"--{flag}", *implied, *given[1:]] if implied else [f"--{flag}{equals}{attached}", *given[1:]]
        elif name not in retired_names(flags):
            words += given
        elif name in CORRECTION:
            correction[name] = value
        else:
            notes.append(retire(name, value))
    return words + correction_words(correction), list(dict.fromkeys(notes))


def grouped(argv: Sequence[str]) -> list[list[str]]:
    """Group the words of a command line: each flag with the words that follow it, up to the next flag."""
    found: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


def environment_arguments(command: type, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Convert environment variables to arguments with lower precedence than flags; also report old variables."""
    flags = flags_of(command)
    old = [(key, name) for key, name in ENVIRONMENT.items() if key in environ and name in flags]
    keys = [(key, name) for key, names in SECRETS.items() if key in environ for name in names if name in flags]
    return [f"--{name}={environ[key]}" for key, name in [*old, *keys]], [f"{key} is now --{name}" for key, name in old]
