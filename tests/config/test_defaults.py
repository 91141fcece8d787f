"""Every documented flag of every command, with its documented default; differences that we chose are marked `ours`."""

from typing import get_args, get_origin

import pytest

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of

PLAIN = "User: {}\nAssistant: "
INF = float("inf")

EVERY_TRAINING = {
    "pretrain": None,
    "save_path": "./ckpt",
    "save_steps": -1,
    "save_hf_ckpt": False,
    "disable_ds_ckpt": False,
    "logging_steps": 1,
    "eval_steps": -1,
    "max_ckpt_num": 3,
    "load_checkpoint": False,
    "use_ds_universal_ckpt": False,
    "train_batch_size": 128,
    "max_norm": 1.0,
    "gradient_checkpointing": False,
    "gradient_checkpointing_use_reentrant": False,
    "deepcompile": None,  # automatic
    "seed": 42,
    "full_determinism": False,
    "local_rank": -1,
    "zero_stage": 2,
    "zpg": 1,
    "adam_offload": False,
    "grad_accum_dtype": None,
    "overlap_comm": False,
    "disable_fast_tokenizer": False,
    "aux_loss_coef": 0.0,
    "lr_warmup_ratio": 0.03,
    "lr_scheduler": "cosine_with_min_lr",
    "l2": 0.0,
    "adam_betas": (0.9, 0.95),
    "load_in_4bit": False,
    "lora_rank": 0,
    "lora_alpha": 16,
    "target_modules": ("all-linear",),
    "lora_dropout": 0.0,
    "eval_dataset": None,
    "use_wandb": None,
    "wandb_org": None,
    "wandb_group": None,
    "use_tensorboard": None,
    "use_ms": False,
    "attn_implementation": "auto",  # ours: flash_attention_2 upstream
    "param_dtype": "bf16",
}
SUPERVISED = EVERY_TRAINING | {
    "dataset": None,
    "dataset_probs": None,
    "dataset_split": "train",
    "max_samples": 1_000_000,
    "max_ckpt_mem": 1e8,
}
TEMPLATE = {"input_template": None, "apply_chat_template": False}
PLAIN_TEMPLATE = {"input_template": PLAIN, "apply_chat_template": False}
PAIRS = {"prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected"}
RING = {"ring_attn_size": 1, "ring_head_stride": 1}
PACKING = {"packing_samples": False}
TENSOR_PARALLEL = {"ds_tensor_parallel_size": 1}
LIGER = {"use_liger_kernel": False}
WORKERS = {"dataloader_num_workers": 0}

RL = {
    **EVERY_TRAINING,
    **TEMPLATE,
    **RING,
    **PACKING,
    **TENSOR_PARALLEL,
    **LIGER,
    **WORKERS,
    "ckpt_path": "./ckpt/checkpoints_ppo_ray",
    "max_ckpt_mem": INF,
    "micro_train_batch_size": 4,
    "max_epochs": 1,
    "eval_split": "train",
    "max_samples": 100_000_000,
    "input_key": "input",
    "max_len": None,  # ours: as before 0.9.8, the sum of the next two, and so 2048 as after it
    "prompt_max_len": 1024,
    "generate_max_len": 1024,
    "wandb_project": "openrlhf_train_ppo",
    "wandb_run_name": "ppo_%s",
    "ref_num_nodes": 1,
    "ref_num_gpus_per_node": None,  # ours, and the next three: 8 under Ray, 1 in one process
    "reward_num_gpus_per_node": None,
    "actor_num_gpus_per_node": None,
    "critic_num_gpus_per_node": None,
    "reward_num_nodes": 1,
    "actor_num_nodes": 1,
    "critic_num_nodes": 1,
    "colocate_actor_ref": False,
    "colocate_critic_reward": False,
    "colocate_all_models": False,
    "vllm_num_engines": None,
    "vllm_tensor_parallel_size": 1,
    "vllm_pipeline_parallel_size": 1,
    "vllm_enable_expert_parallel": False,
    "vllm_sync_backend": "nccl",
    "vllm_sync_with_ray": False,
    "enable_prefix_caching": None,  # ours: on with an agent
    "enforce_eager": False,
    "vllm_enable_sleep": False,
    "vllm_gpu_memory_utilization": 0.95,
    "async_train": False,
    "enable_ema": False,
    "ema_beta": 0.992,
    "deepspeed_enable_sleep": False,
    "num_episodes": 1,
    "rollout_batch_size": 1024,
    "micro_rollout_batch_size": 8,
    "eps_clip": 0.2,
    "value_clip": 0.5,
    "lambd": 1.0,
    "gamma": 1.0,
    "normalize_reward": False,
    "top_p": 1.0,
    "temperature": 1.0,
    "freezing_actor_steps": -1,
    "n_samples_per_prompt": 1,
    "save_value_network": False,
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "kl_target": None,
    "kl_horizon": 10_000,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
    "entropy_loss_coef": None,
    "reward_clip_range": (-10.0, 10.0),
    "advantage_estimator": "gae",
    "use_kl_loss": False,
    "no_advantage_std_norm": False,
    "reward_pretrain": None,
    "remote_rm_url": None,
    "critic_pretrain": None,
    "value_head_prefix": "score",
    "ref_reward_offload": False,
    "agent_func_path": None,
    "prompt_data": None,
    "prompt_data_probs": None,
    "prompt_split": "train",
    "eval_temperature": 0.6,
    "eval_n_samples_per_prompt": 4,
    "label_key": None,
    "vllm_generate_batch_size": None,
    "dynamic_filtering": False,
    "dynamic_filtering_reward_range": (0.0, 1.0),
    "eps_clip_low_high": None,
    "use_dynamic_batch": False,
    "rollout_max_tokens_per_gpu": None,
    "train_max_tokens_per_gpu": 16192,
    "dual_clip": None,
    "overlong_buffer_len": None,
    "overlong_penalty_factor": 1.0,
    "policy_loss_type": "ppo",
    "enable_vllm_is_correction": None,
    "vllm_is_truncated_threshold": (0.5, 5.0),
    "vllm_is_correction_type": "tis",
    "async_queue_size": 1,
    "stop_properly_penalty_coef": None,
    "partial_rollout": False,
    "max_new_tokens": None,
    "best_metric_key": "",
}

DOCUMENTED = {
    "view": {"run_dirs": (), "port": None, "open": False, "export": None},  # ours
    "train_sft": {
        **SUPERVISED,
        **PLAIN_TEMPLATE,
        **RING,
        **PACKING,
        **TENSOR_PARALLEL,
        **LIGER,
        **WORKERS,
        "ckpt_path": "./ckpt/checkpoints_sft",
        "micro_train_batch_size": 8,
        "max_epochs": 2,
        "learning_rate": 5e-6,
        "eval_split": "train",
        "input_key": "input",
        "output_key": None,
        "max_len": 2048,
        "wandb_project": "openrlhf_train_sft",
        "wandb_run_name": "sft_%s",
        "pretrain_mode": False,
        "multiturn": False,
        "tokenizer_chat_template": None,
    },
    "train_rm": {
        **SUPERVISED,
        **TEMPLATE,
        **PAIRS,
        **RING,
        **PACKING,
        **TENSOR_PARALLEL,
        **WORKERS,
        "ckpt_path": "./ckpt/checkpoints_rm",
        "micro_train_batch_size": 1,
        "max_epochs": 1,
        "learning_rate": 9e-6,
        "eval_split": "train",
        "max_len": 512,
        "wandb_project": "openrlhf_train_rm",
        "wandb_run_name": "rm_%s",
        "value_head_prefix": "score",
        "compute_fp32_loss": False,
        "margin_loss": False,
        "loss": "sigmoid",
        "tokenizer_chat_template": None,
    },
    "train_dpo": {
        **SUPERVISED,
        **TEMPLATE,
        **PAIRS,
        **RING,
        **PACKING,
        **TENSOR_PARALLEL,
        **LIGER,
        **WORKERS,
        "ckpt_path": "./ckpt/checkpoints_dpo",
        "micro_train_batch_size": 8,
        "max_epochs": 1,
        "learning_rate": 1e-5,
        "eval_split": "test",
        "max_len": 512,
        "wandb_project": "openrlhf_train_dpo",
        "wandb_run_name": "exp_%s",
        "ref_offload": False,
        "beta": 0.1,
        "ipo": False,
        "label_smoothing": 0.0,
        "nll_loss_coef": 0.0,
        "ref_pretrain": None,
        "min_lr_ratio": 0.1,
        "tokenizer_chat_template": None,
    },
    "train_kto": {
        **SUPERVISED,
        **PLAIN_TEMPLATE,
        **LIGER,
        "pretrain": "bigscience/bloomz-1b7",
        "ckpt_path": "./ckpt/checkpoints_kto",
        "micro_train_batch_size": 8,
        "max_epochs": 1,
        "learning_rate": 1e-5,
        "eval_split": "test",
        "max_len": 2048,
        "wandb_project": "openrlhf_train_dpo",
        "wandb_run_name": "rm_%s",
        "ref_offload": False,
        "beta": 0.01,
        "desirable_loss_weight": 1.0,
        "undesirable_loss_weight": 1.0,
        "input_key": "input",
        "output_key": None,
        "label_key": "label",
    },
    "train_kd": {
        **SUPERVISED,
        **PLAIN_TEMPLATE,
        **TENSOR_PARALLEL,
        **LIGER,
        "ckpt_path": "./ckpt/checkpoints_kd",
        "micro_train_batch_size": 8,
        "max_epochs": 1,
        "learning_rate": 5e-6,
        "eval_split": "test",
        "max_len": 2048,
        "wandb_project": "openrlhf_train_sft",
        "wandb_run_name": "sft_%s",
        "teacher_model": None,
        "teacher_offload": False,
        "kd_coef": 0.4,
        "pretrain_mode": False,
        "input_key": "input",
        "output_key": "output",
    },
    "train_prm": {
        **SUPERVISED,
        **PACKING,
        **TENSOR_PARALLEL,
        **LIGER,
        "ckpt_path": "./ckpt/checkpoints_prm",
        "micro_train_batch_size": 1,
        "max_epochs": 1,
        "learning_rate": 1e-6,
        "eval_split": "test",
        "max_len": 2048,
        "wandb_project": "openrlhf_train_prm",
        "wandb_run_name": "prm_%s",
        "placeholder_token": None,
        "reward_tokens": (),
        "input_key": "input",
        "label_key": "label",
    },
    "train_ppo_ray": RL,
    "train_ppo": RL,
    "batch_inference": {
        "eval_task": None,
        "zero_stage": 0,
        "local_rank": -1,
        "disable_fast_tokenizer": False,
        "micro_batch_size": 16,
        "seed": 1234,
        "full_determinism": False,
        "pretrain": None,
        "value_head_prefix": "score",  # ours: upstream's value_head fits no model that its trainers write
        "dataset": None,
        "dataset_probs": None,
        "input_key": "input",
        "output_key": "output",
        "apply_chat_template": False,
        "input_template": None,
        "max_len": 2048,
        "max_samples": 100_000_000,
        "output_path": None,
        "prompt_max_len": 1024,
        "max_new_tokens": 1024,
        "greedy_sampling": False,
        "top_p": 1.0,
        "temperature": 1.0,
        "repetition_penalty": 1.0,
        "best_of_n": 1,
        "post_processor": None,
        "tp_size": None,  # ours: counted when the engine starts, since counting here would import torch
        "max_num_seqs": 256,
        "enable_prefix_caching": False,
        "iter": None,
        "rollout_batch_size": 2048,
        "normalize_reward": False,
        "reward_template": None,
        "enable_csft": False,
        "csft_prompt": "<rm_score>: 5.00",
        "use_ms": False,
        "attn_implementation": "auto",
        "param_dtype": "bf16",
    },
    "interactive_chat": {
        "disable_fast_tokenizer": False,
        "load_in_4bit": False,
        "pretrain": None,
        "max_len": 4096,
        "greedy_sampling": False,
        "top_p": 0.9,
        "temperature": 0.2,
        "repetition_penalty": 1.2,
        **PLAIN_TEMPLATE,
        "ta_prompt": None,
        "enable_csft": False,
        "csft_prompt": "<rm_score>: 5.00",
        "use_ms": False,
        "attn_implementation": "auto",
        "param_dtype": "bf16",
    },
    "serve_rm": {
        "reward_pretrain": None,
        "normalize_reward": False,
        "value_head_prefix": "score",
        "max_len": 2048,
        "port": 5000,
        "host": "127.0.0.1",  # ours: 0.0.0.0 upstream
        "load_in_4bit": False,
        "disable_fast_tokenizer": False,
        "batch_size": None,
        "use_ms": False,
        "packing_samples": False,
        "attn_implementation": "auto",
        "param_dtype": "bf16",
    },
    "lora_combiner": {
        "model_path": None,
        "lora_path": None,
        "output_path": None,
        "is_rm": False,
        "param_dtype": "bf16",
    },
    "init": {"task": None, "output": None, "overwrite": False},
    "doctor": {"online": False, "json": False},
    "export": {  # ours
        "pretrain": None,
        "output_path": None,
        "gguf": None,
        "param_dtype": "bf16",
        "push_to_hub": None,
    },
}

# Flags of later versions, and our own.
ADDED_TO_TRAINING = {
    "device": "auto",
    "trust_remote_code": False,
    "run_dir": None,
    "dry_run": False,
    "max_steps": None,
    "optim": "adam",
    "adam_eps": 1e-8,
    "use_trackio": None,
    "muon_lr": 0.02,
    "muon_momentum": 0.95,
    "muon_ns_steps": 5,
    "muon_nesterov": True,
    "min_lr_ratio": 0.1,
    "push_to_hub": None,
    "hub_private": False,
    "experts_implementation": None,
    "expert_parallel_size": 1,
}
ADDED_TO_RL = {
    "router_replay": False,
    "top_k": -1,
    "min_p": 0.0,
    "stop": (),
    "chat_template_kwargs": None,
    "system_prompt": None,
    "system_key": None,
    "loss_agg_mode": None,  # token-mean, and constant for dr_grpo
    "reward_timeout": 180.0,
    "max_turns": None,
    "step_rewards": False,
    "reward_weights": (),
    "prm_reduce": "min",
    "reward_processes": None,
    "reward_concurrency": None,
    "reward_batch_groups": 1,
    "on_reward_error": "stop",
    "max_concurrent_episodes": None,
    "max_episodes_per_engine": None,
    "kl_unbiased_gradient": False,
    "ref_pretrain": None,
    "max_restarts": 1,
    "engine_timeout": 1800.0,
    "worker_timeout": 7200.0,
    "sync_check_every": 0,
    "reward_api_key": None,
}
TRAINING = [name for name in COMMANDS if name.startswith("train_")]


def defaults(command):
    return {name: item.default for name, item in flags_of(COMMANDS[command]).items()}


def test_the_table_covers_every_command():
    assert DOCUMENTED.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", DOCUMENTED)
def test_every_documented_flag_has_its_documented_default(command):
    ours = defaults(command)
    assert {name: ours.get(name, "no such flag") for name in DOCUMENTED[command]} == DOCUMENTED[command]


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_have_the_added_flags(command):
    assert ADDED_TO_TRAINING.items() <= defaults(command).items()


@pytest.mark.parametrize(("command", "runtime"), [("train_ppo_ray", "auto"), ("train_ppo", "local")])
def test_reinforcement_learning_has_the_added_flags_and_a_runtime(command, runtime):
    assert (ADDED_TO_RL | {"runtime": runtime}).items() <= defaults(command).items()


def test_dpo_can_average_ipo_over_the_length():
    assert defaults("train_dpo")["ipo_length_average"] is False


def test_ppo_context_is_2048_tokens_by_default():
    assert COMMANDS["train_ppo_ray"]().rollout.context_length == 2048


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_accepts_its_default(command):
    for item in flags_of(COMMANDS[command]).values():
        forms = get_args(item.type) if type(None) in get_args(item.type) else (item.type,)
        kinds = tuple(get_origin(form) or form for form in forms)
        if item.default is not None and not any("Literal" in str(form) for form in forms):
            assert isinstance(item.default, (*kinds, int) if float in kinds else kinds), item


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_explains_itself(command):
    assert [item.name for item in flags_of(COMMANDS[command]).values() if not item.help.endswith(".")] == []
