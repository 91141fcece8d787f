"""Names that users of TRL, LLaMA-Factory, verl and Transformers type, and our names with that meaning.

They are not aliases: some differ in meaning (a batch per device, or over all devices), so a run does not guess. The
errors about unknown flags and values (`unknown_flags.py`) and `--help` name our flag and, in a note, the difference.
`CHOICES` does the same for values, and `COMMAND_LINES` for commands.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Suggestion:
    """Names used elsewhere, and the flags that replace them: the first one that a command has is suggested."""

    names: str  # separated by spaces
    flags: str  # separated by spaces
    note: str = ""


# Flags of other frameworks that are not needed here; the error says to leave them out.
UNNEEDED = (
    "do_train",
    "stage",
    "overwrite_cache",
    "overwrite_output_dir",
    "preprocessing_num_workers",
    "plot_loss",
    "ddp_timeout",
)
STEP = "samples per optimizer step over all devices; --micro_train_batch_size is per device"
SUGGESTIONS = (
    # Model, adapters and precision.
    Suggestion("model model_name model_name_or_path base_model hf_model", "pretrain reward_pretrain model_path"),
    Suggestion("model_path actor_model", "pretrain reward_pretrain"),
    Suggestion("ref_model ref_model_name_or_path reference_model", "ref_pretrain"),
    Suggestion("reward_model reward_model_path reward_model_name_or_path rm_path", "reward_pretrain"),
    Suggestion("teacher teacher_model_name_or_path", "teacher_model"),
    Suggestion("adapter adapter_path adapter_name_or_path peft_path", "lora_path"),
    Suggestion("lora_r r rank", "lora_rank"),
    Suggestion("lora lora_enable use_lora use_peft peft finetuning_type", "lora_rank", "above 0 trains adapters"),
    Suggestion("lora_target lora_target_modules lora_modules", "target_modules"),
    Suggestion("fp16 fp32 dtype torch_dtype precision", "param_dtype", "bf16, fp16 or fp32"),
    Suggestion("enable_liger_kernel use_liger liger_kernel", "use_liger_kernel"),
    Suggestion("load_in_8bit quantization quantization_bit qlora", "load_in_4bit", "4-bit is the only quantisation"),
    Suggestion("use_flash_attn use_flash_attention attn_impl fa2", "attn_implementation", "auto is fast on a GPU"),
    # Data.
    Suggestion("data data_path dataset_name dataset_dir train_data train_file train_files", "dataset prompt_data"),
    Suggestion("prompts prompt_dataset", "prompt_data dataset"),
    Suggestion("validation_file eval_file eval_data val_data val_files test_file", "eval_dataset"),
    Suggestion("val_size validation_split test_size", "eval_size", "a fraction or a number of rows"),
    Suggestion("interleave_probs mix_strategy", "dataset_probs prompt_data_probs"),
    Suggestion("mask_history", "multiturn", "without it, only the last turn is learned"),
    Suggestion("train_on_prompt", "pretrain_mode", "learns every token of plain text"),
    Suggestion("max_train_samples num_samples", "max_samples"),
    Suggestion("max_seq_length max_seq_len max_length seq_length cutoff_len block_size model_max_length", "max_len"),
    Suggestion("max_prompt_length prompt_length", "prompt_max_len max_len"),
    Suggestion(
        "template chat_template_name prompt_template", "apply_chat_template", "the tokenizer's own chat template"
    ),
    Suggestion("chat_template chat_template_path", "tokenizer_chat_template"),
    Suggestion("system default_system", "system_prompt"),
    Suggestion("system_column system_field", "system_key"),
    Suggestion("prompt_column prompt_field text_field dataset_text_field query_key", "input_key prompt_key"),
    Suggestion("response_key completion_key response_column answer_key", "output_key label_key"),
    Suggestion("packing neat_packing pack use_remove_padding", "packing_samples"),
    # Batches, steps and the optimizer.
    Suggestion("batch_size global_batch_size", "train_batch_size", STEP),
    Suggestion("batch_size global_batch_size", "micro_batch_size"),
    Suggestion(
        "per_device_train_batch_size micro_batch_size per_gpu_train_batch_size",
        "micro_train_batch_size",
        "samples per device; --train_batch_size is the whole optimizer step",
    ),
    Suggestion(
        "per_device_eval_batch_size eval_batch_size",
        "micro_train_batch_size micro_batch_size",
        "also used for evaluation",
    ),
    Suggestion(
        "gradient_accumulation_steps accumulation_steps grad_accum",
        "train_batch_size",
        "samples per step = micro_train_batch_size x devices x accumulation steps",
    ),
    Suggestion("num_train_epochs epochs num_epochs total_epochs", "num_episodes max_epochs", "passes over the data"),
    Suggestion("num_iterations ppo_epochs num_ppo_epochs", "max_epochs", "in RL, passes over each rollout"),
    Suggestion("steps num_steps total_steps max_train_steps total_training_steps", "max_steps"),
    Suggestion("lr learning_rates actor_lr", "learning_rate actor_learning_rate"),
    Suggestion("learning_rate policy_lr", "actor_learning_rate", "the critic has --critic_learning_rate"),
    Suggestion("critic_lr value_lr", "critic_learning_rate"),
    Suggestion("warmup warmup_ratio warmup_steps", "lr_warmup_ratio", "a share of the steps, such as 0.03"),
    Suggestion("lr_scheduler_type scheduler lr_schedule", "lr_scheduler"),
    Suggestion("weight_decay wd", "l2"),
    Suggestion("max_grad_norm grad_clip clip_grad gradient_clipping", "max_norm"),
    Suggestion("adam_beta1 adam_beta2 betas", "adam_betas", "both values, such as --adam_betas 0.9 0.95"),
    Suggestion("adam_epsilon eps", "adam_eps"),
    Suggestion("deepspeed deepspeed_config", "zero_stage", "0 to 3; there is no configuration file"),
    Suggestion("fsdp fsdp_config", "backend", "such as --backend fsdp"),
    Suggestion("activation_checkpointing enable_gradient_checkpointing", "gradient_checkpointing"),
    Suggestion("offload cpu_offload optimizer_offload", "adam_offload"),
    # Output.
    Suggestion("output_dir output save_dir out_dir default_local_dir", "save_path output_path"),
    Suggestion("output_file out", "output_path save_path"),
    Suggestion(
        "resume resume_from_checkpoint resume_from resume_mode",
        "load_checkpoint",
        "a switch; the folder is --ckpt_path",
    ),
    Suggestion("save_strategy save_freq save_interval", "save_steps", "a number of steps"),
    Suggestion("save_total_limit", "max_ckpt_num"),
    Suggestion("eval_strategy evaluation_strategy test_freq eval_interval", "eval_steps", "a number of steps"),
    Suggestion("report_to logger log_with", "use_wandb", "or --use_tensorboard FOLDER"),
    Suggestion("logging_dir tensorboard_dir", "use_tensorboard"),
    Suggestion("run_name experiment_name exp_name", "wandb_run_name"),
    Suggestion("project project_name", "wandb_project"),
    # Reinforcement learning and generation.
    Suggestion("data.train_batch_size prompts_per_step", "rollout_batch_size", "prompts per rollout"),
    Suggestion("ppo_mini_batch_size mini_batch_size", "train_batch_size", "samples, not prompts, per optimizer step"),
    Suggestion("ppo_micro_batch_size ppo_micro_batch_size_per_gpu", "micro_train_batch_size"),
    Suggestion("log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu", "micro_rollout_batch_size"),
    Suggestion(
        "num_generations n group_size num_return_sequences num_samples_per_prompt", "n_samples_per_prompt best_of_n"
    ),
    Suggestion("max_new_tokens", "max_len", "tokens of prompt and response together"),
    Suggestion("max_completion_length max_response_length response_length max_tokens", "max_new_tokens max_len"),
    Suggestion("pref_beta", "beta"),
    Suggestion("pref_loss loss_type", "ipo", "a switch; sigmoid is the default"),
    Suggestion("pref_ftx sft_coef", "nll_loss_coef"),
    Suggestion("dpo_label_smoothing", "label_smoothing"),
    Suggestion("kto_chosen_weight desirable_weight", "desirable_loss_weight"),
    Suggestion("kto_rejected_weight undesirable_weight", "undesirable_loss_weight"),
    Suggestion("beta", "init_kl_coef", "weight of the KL to the reference"),
    Suggestion("kl_coef kl_loss_coef kl_beta kl_weight", "init_kl_coef beta", "weight of the KL to the reference"),
    Suggestion("kl_penalty kl_type kl_loss_type", "kl_estimator", "k1, k2 or k3"),
    Suggestion("adv_estimator algorithm algo", "advantage_estimator", "group_norm is GRPO, gae is PPO"),
    Suggestion("loss_type", "loss_agg_mode", "GRPO itself is --advantage_estimator group_norm"),
    Suggestion("loss_type", "loss"),
    Suggestion("epsilon clip_range cliprange clip_ratio clip_eps", "eps_clip"),
    Suggestion("epsilon_high clip_ratio_high clip_higher", "eps_clip_low_high", "both bounds, such as 0.2 0.28"),
    Suggestion("lam gae_lambda lambda", "lambd"),
    Suggestion("entropy_coeff entropy_coef ent_coef", "entropy_loss_coef"),
    Suggestion(
        "reward_func reward_funcs reward_function reward reward_fn custom_reward_function",
        "remote_rm_url",
        "a .py file with reward_func",
    ),
    Suggestion("agent agent_path env environment", "agent_func_path", "a .py file with an agent"),
    Suggestion(
        "use_vllm vllm vllm_mode",
        "vllm_num_engines",
        "the number of engines; 1 in train_ppo runs vLLM in the same process",
    ),
    Suggestion("tensor_parallel_size tensor_model_parallel_size tp", "vllm_tensor_parallel_size tp_size"),
    Suggestion("pipeline_parallel_size pipeline_model_parallel_size pp", "vllm_pipeline_parallel_size"),
    Suggestion("enable_expert_parallel", "vllm_enable_expert_parallel"),
    Suggestion("gpu_memory_utilization gpu_mem", "vllm_gpu_memory_utilization"),
    Suggestion("num_gpus gpus n_gpus_per_node num_processes nproc_per_node", "actor_num_gpus_per_node"),
    Suggestion("nnodes num_nodes", "actor_num_nodes"),
    Suggestion("do_sample greedy", "greedy_sampling", "sampling is the default"),
)


# Values of flags elsewhere -> the flags to write here. Case and separators do not matter: `Dr. GRPO` is `drgrpo`.
ESTIMATORS: Mapping[str, str] = {
    **dict.fromkeys(("grpo", "grpovectorized"), "--advantage_estimator group_norm"),
    **dict.fromkeys(("drgrpo", "grpodoneright"), "--advantage_estimator dr_grpo"),
    "ppo": "--advantage_estimator gae",
    **dict.fromkeys(("reinforce++", "reinforceplusplus", "reinforcepp"), "--advantage_estimator reinforce"),
    **dict.fromkeys(
        ("reinforce++baseline", "reinforceplusplusbaseline", "reinforceppbaseline"),
        "--advantage_estimator reinforce_baseline",
    ),
    **dict.fromkeys(("loo", "leaveoneout", "rloovectorized"), "--advantage_estimator rloo"),
    "dapo": "--advantage_estimator group_norm --dynamic_filtering --eps_clip_low_high 0.2 0.28",
    "gspo": "--advantage_estimator group_norm --policy_loss_type gspo --eps_clip_low_high 3e-4 4e-4",
}
DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("bfloat16", "torchbfloat16", "bf16mixed"), "--param_dtype bf16"),
    **dict.fromkeys(("float16", "torchfloat16", "half", "16"), "--param_dtype fp16"),
    **dict.fromkeys(("float32", "torchfloat32", "float", "32"), "--param_dtype fp32"),
}
CHOICES: Mapping[str, Mapping[str, str]] = {  # by flag
    "advantage_estimator": ESTIMATORS,
    "policy_loss_type": {name: words for name, words in ESTIMATORS.items() if name not in ("ppo", "gspo")},
    "param_dtype": DTYPES,
    "kl_estimator": {
        **dict.fromkeys(("kl", "abs"), "--kl_estimator k1"),
        "mse": "--kl_estimator k2",
        **dict.fromkeys(("lowvarkl", "lowvar"), "--kl_estimator k3"),
    },
    "optim": dict.fromkeys(("adamw", "adamwtorch", "adamwtorchfused", "adamwhf"), "--optim adam"),
    "loss_agg_mode": dict.fromkeys(("seqmeantokensumnorm", "drgrpo"), "--loss_agg_mode constant"),
}

# Names of commands elsewhere -> the command line to write here, after `openrlhf`.
COMMAND_LINES: Mapping[str, str] = {
    **{name: f"train_{name}" for name in ("sft", "rm", "dpo", "kto", "kd", "prm", "ppo")},
    **dict.fromkeys(("finetune", "fine_tune"), "train_sft"),
    **dict.fromkeys(("pretrain", "pt"), "train_sft --pretrain_mode"),
    **dict.fromkeys(("reward", "reward_model"), "train_rm"),
    **dict.fromkeys(("ipo", "cdpo"), "train_dpo"),
    **dict.fromkeys(("distill", "gkd"), "train_kd"),
    **dict.fromkeys(("rl", "rlhf"), "train_ppo"),
    **{
        name: f"train_ppo {ESTIMATORS[name.replace('_', '')]}"
        for name in ("grpo", "dr_grpo", "reinforce++", "dapo", "gspo")
    },
    **{name: f"train_ppo --advantage_estimator {name}" for name in ("rloo", "reinforce")},
    "chat": "interactive_chat",
    **dict.fromkeys(("generate", "inference", "infer", "eval", "evaluate"), "batch_inference"),
    **dict.fromkeys(("serve", "api"), "serve_rm"),
    **dict.fromkeys(("merge", "merge_lora"), "lora_combiner"),
    **dict.fromkeys(("convert", "gguf", "push"), "export"),
    **dict.fromkeys(("ui", "webui", "web", "board", "dashboard", "logs"), "view"),
    **dict.fromkeys(("env", "check", "info"), "doctor"),
    **dict.fromkeys(("config", "new"), "init"),
    **dict.fromkeys(("data", "dataset"), "preview train_sft"),
}


@dataclass(frozen=True)
class Suggested:
    """Our flag for a name used elsewhere, with a note if the meaning may differ."""

    flag: str
    note: str

    def __str__(self) -> str:
        return f"--{self.flag} ({self.note})" if self.note else f"--{self.flag}"


def suggest(name: str, flags: Collection[str]) -> Suggested | None:
    """Return the flag of a command for a name used elsewhere, or None.

    For a dotted name, such as verl's `actor_rollout_ref.rollout.n`, the last part is used if the whole is not listed.
    """
    for asked in dict.fromkeys((name, name.rpartition(".")[2])):
        for item in SUGGESTIONS:
            known = [flag for flag in item.flags.split() if flag in flags]
            if asked in item.names.split() and known:
                return Suggested(known[0], item.note)
    return None


def suggest_choice(flag: str, given: str, choices: Sequence[str]) -> str | None:
    """Return a replacement for `--flag given`: our words for a value used elsewhere, or a similar choice."""
    value = without_separators(given)
    if value in CHOICES.get(flag, {}):
        return CHOICES[flag][value]
    similar = {without_separators(choice): choice for choice in choices}
    near = difflib.get_close_matches(value, similar, n=1)
    return f"--{flag} {similar[near[0]]}" if near else None


def without_separators(text: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", text.lower())


def suggest_commands(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """Return command lines for a name that is not a command: one used elsewhere, or similar names."""
    name = words[0].replace("-", "_").lower()
    joined = "_".join([name, *(word.replace("-", "_").lower() for word in words[1:2])])  # `train sft`
    for asked in (joined, name, name.removeprefix("train_")):
        if asked in commands:
            return [asked]
        if asked in COMMAND_LINES:
            return [COMMAND_LINES[asked]]
    return difflib.get_close_matches(name, commands, n=3)
