"""Names that users of TRL, LLaMA-Factory, verl and Transformers type, and our flags with that meaning.

They are not aliases: some differ in meaning (a batch per device, or over all devices), so a run does not guess. The
error about an unknown flag (`parser.unknown_flag`) names our flag and, in a note, the difference.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Suggestion:
    """Names used elsewhere, and the flags that replace them: the first one that a command has is suggested."""

    names: str  # separated by spaces
    flags: str  # separated by spaces
    note: str = ""


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
    Suggestion("load_in_8bit quantization quantization_bit qlora", "load_in_4bit", "4-bit is the only quantisation"),
    Suggestion("use_flash_attn use_flash_attention attn_impl fa2", "attn_implementation", "auto is fast on a GPU"),
    # Data.
    Suggestion("data data_path dataset_name dataset_dir train_data train_file train_files", "dataset prompt_data"),
    Suggestion("prompts prompt_dataset", "prompt_data dataset"),
    Suggestion("validation_file eval_file eval_data val_data val_files test_file", "eval_dataset"),
    Suggestion("max_train_samples num_samples", "max_samples"),
    Suggestion("max_seq_length max_seq_len max_length seq_length cutoff_len block_size model_max_length", "max_len"),
    Suggestion("max_prompt_length prompt_length", "prompt_max_len max_len"),
    Suggestion(
        "template chat_template_name prompt_template", "apply_chat_template", "the tokenizer's own chat template"
    ),
    Suggestion("chat_template chat_template_path", "tokenizer_chat_template"),
    Suggestion("system default_system", "system_prompt"),
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
    Suggestion("deepspeed deepspeed_config fsdp", "zero_stage", "0 to 3; there is no configuration file"),
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
    Suggestion("beta", "init_kl_coef", "weight of the KL to the reference"),
    Suggestion("kl_coef kl_loss_coef kl_beta kl_weight", "init_kl_coef beta", "weight of the KL to the reference"),
    Suggestion("kl_penalty kl_type kl_loss_type", "kl_estimator", "k1, k2 or k3"),
    Suggestion("adv_estimator algorithm algo loss_type", "advantage_estimator", "group_norm is GRPO, gae is PPO"),
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
    Suggestion("gpu_memory_utilization gpu_mem", "vllm_gpu_memory_utilization"),
    Suggestion("num_gpus gpus n_gpus_per_node num_processes nproc_per_node", "actor_num_gpus_per_node"),
    Suggestion("nnodes num_nodes", "actor_num_nodes"),
    Suggestion("do_sample greedy", "greedy_sampling", "sampling is the default"),
)


def suggest(name: str, flags: Collection[str]) -> str | None:
    """Return the flag of a command for a name used elsewhere, with a note if the meaning may differ, or None.

    Of a dotted name, such as verl's `actor_rollout_ref.rollout.n`, the last part counts if the whole is not listed.
    """
    for asked in dict.fromkeys((name, name.rpartition(".")[2])):
        for item in SUGGESTIONS:
            known = [flag for flag in item.flags.split() if flag in flags]
            if asked in item.names.split() and known:
                return f"--{known[0]} ({item.note})" if item.note else f"--{known[0]}"
    return None
