"""The configs that each rule rejects, changes or comments on. A case is a valid command with added flags."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import openrlhf
from openrlhf.config.check import RULES, check
from openrlhf.config.checks.extras import install_command, requirements_of
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flag_values, flags_of, replace_flags
from openrlhf.config.parser import parse
from openrlhf.config.runtime import critic_model, most_episodes, num_devices, resolve_runtime
from openrlhf.config.sections.cluster import ROLES
from openrlhf.errors import ConfigError, MissingExtraError

SUPERVISED = "--pretrain ./model --dataset ./data.jsonl"
RL = "--pretrain ./model --prompt_data ./data.jsonl --remote_rm_url ./reward.py"
VALID = {
    "train_sft": SUPERVISED,
    "train_rm": SUPERVISED,
    "train_dpo": SUPERVISED,
    "train_kto": SUPERVISED,
    "train_kd": f"{SUPERVISED} --teacher_model ./model",
    "train_prm": f"{SUPERVISED} --placeholder_token ки --reward_tokens + -",
    "train_ppo": RL,
    "train_ppo_ray": RL,
    "batch_inference": f"{SUPERVISED} --eval_task generate --output_path ./out.jsonl",
    "interactive_chat": "--pretrain ./model",
    "serve_rm": "--reward_pretrain ./model",
    "lora_combiner": "--model_path ./model --lora_path ./adapter --output_path ./merged",
    "view": "./model",
    "export": "--pretrain ./model --output_path ./exported",
}
PAIR = "--actor_num_gpus_per_node 2 --critic_num_gpus_per_node 2 --ref_num_gpus_per_node 2"
HYBRID = "--colocate_all_models --vllm_num_engines 8"

REFUSED = [  # rule, command, added flags, parts of the message
    ("required_flags_are_given", "train_sft", "--pretrain=", "--pretrain is not given|Try: --pretrain ./model"),
    ("required_flags_are_given", "train_sft", "--dataset=", "--dataset is not given"),
    ("required_flags_are_given", "train_kd", "--teacher_model=", "--teacher_model is not given"),
    ("required_flags_are_given", "train_prm", "--placeholder_token=", "--placeholder_token is not given"),
    ("reward_tokens_differ", "train_prm", "--reward_tokens +", "--reward_tokens +|--reward_tokens + -"),
    ("reward_tokens_differ", "train_prm", "--reward_tokens + +", "--reward_tokens + +"),
    ("required_flags_are_given", "train_ppo", "--prompt_data=", "--prompt_data is not given"),
    ("a_reward_is_given", "train_ppo", "--remote_rm_url=", "--reward_pretrain, --remote_rm_url or --agent_func_path"),
    ("required_flags_are_given", "serve_rm", "--reward_pretrain=", "--reward_pretrain is not given"),
    ("other_machines_need_a_key", "serve_rm", "--host 0.0.0.0", "--host 0.0.0.0|OPENRLHF_RM_API_KEY"),
    ("other_machines_need_a_key", "serve_rm", "--host example.org --api_key=", "--host example.org|no API key"),
    ("keys_fit_into_a_header", "serve_rm", "--api_key 'a key'", "--api_key must be ASCII|openssl"),
    ("keys_fit_into_a_header", "train_ppo", "--reward_api_key ключ", "--reward_api_key must be ASCII"),
    ("a_chat_begins_once", "interactive_chat", "--system_prompt Hi", "--system_prompt|--apply_chat_template"),
    (
        "a_chat_begins_once",
        "interactive_chat",
        "--apply_chat_template --system_prompt Hi --ta_prompt ./history.txt",
        "--ta_prompt and --system_prompt",
    ),
    ("required_flags_are_given", "batch_inference", "--output_path=", "--output_path is not given"),
    ("required_flags_are_given", "batch_inference", "--dataset=", "--dataset is not given"),
    ("required_flags_are_given", "lora_combiner", "--lora_path=", "--lora_path is not given"),
    ("run_folders_exist", "view", "./nowhere", "RUN_DIR ./nowhere: no such folder|--save_path or --run_dir"),
    ("run_folders_exist", "view", "./data.jsonl", "RUN_DIR ./data.jsonl: no such folder"),
    ("numbers_are_in_range", "train_sft", "--train_batch_size 0", "--train_batch_size is 0|above 0"),
    ("numbers_are_in_range", "train_sft", "--zero_stage 4", "--zero_stage is 4|0, 1, 2 or 3"),
    ("numbers_are_in_range", "train_sft", "--adam_betas 0.9 1.0", "--adam_betas is 1.0|below 1"),
    ("numbers_are_in_range", "train_sft", "--learning_rate nan", "--learning_rate is nan|0 or more"),
    ("numbers_are_in_range", "train_sft", "--seed -1", "--seed is -1|between 0 and 2^32 - 1"),
    ("numbers_are_in_range", "train_sft", "--save_steps 0", "--save_steps is 0|above 0, or -1"),
    ("numbers_are_in_range", "train_dpo", "--label_smoothing 0.7", "--label_smoothing is 0.7|between 0 and 0.5"),
    (
        "correction_needs_the_whole_distribution",
        "train_ppo",
        "--enable_vllm_is_correction --top_p 0.9 --temperature 0.7",
        "--top_p 0.9 excludes tokens at --temperature 0.7|Try: --temperature 1, no --top_p",
    ),
    (
        "correction_needs_the_whole_distribution",
        "train_ppo",
        "--async_train --top_p 0.9 --temperature 0.7",
        "--top_p 0.9 excludes tokens|--async_train turns correction on|or --enable_vllm_is_correction false",
    ),
    (
        "correction_needs_the_whole_distribution",
        "train_ppo",
        "--enable_vllm_is_correction --top_k 5 --temperature 0.7",
        "--top_k 5 excludes tokens at --temperature 0.7",
    ),
    (
        "correction_needs_the_whole_distribution",
        "train_ppo",
        "--enable_vllm_is_correction --min_p 0.1 --temperature 0.7",
        "--min_p 0.1 excludes tokens at --temperature 0.7",
    ),
    ("numbers_are_in_range", "train_ppo", "--dual_clip 1.0", "--dual_clip is 1.0|above 1"),
    ("numbers_are_in_range", "train_ppo", "--async_queue_size -1", "--async_queue_size is -1|0 or more"),
    ("numbers_are_in_range", "train_ppo_ray", "--max_restarts -1", "--max_restarts is -1|0 or more"),
    ("numbers_are_in_range", "train_ppo_ray", "--sync_check_every -1", "--sync_check_every is -1|0 or more"),
    ("numbers_are_in_range", "train_ppo", "--top_p 0", "--top_p is 0.0|above 0 and at most 1"),
    ("numbers_are_in_range", "train_ppo", "--stop_properly_penalty_coef 2", "--stop_properly_penalty_coef|at most 1"),
    (
        "texts_are_unicode",
        "train_sft",
        "--input_template 'caf\udce9 {}'",
        r"--input_template 'caf\udce9 {}' is not UTF-8|Try: ",
    ),
    ("shortest_response_fits", "train_ppo", "--max_new_tokens 4 --min_new_tokens 8", "--min_new_tokens 8|length of 4"),
    ("stop_strings_are_not_empty", "train_ppo", "--stop a ''", "--stop has an empty string|Try: no --stop"),
    ("numbers_are_in_range", "serve_rm", "--port 0", "--port is 0|above 0"),
    ("numbers_are_in_range", "serve_rm", "--port 65536", "--port is 65536|at most 65535"),
    (
        "four_bit_needs_bf16",
        "train_sft",
        "--load_in_4bit --lora_rank 8 --param_dtype fp16",
        "--load_in_4bit|expected --param_dtype bf16, got fp16",
    ),
    (
        "four_bit_needs_bf16",
        "serve_rm",
        "--load_in_4bit --param_dtype fp16",
        "--load_in_4bit|expected --param_dtype bf16, got fp16",
    ),
    ("four_bit_trains_adapters", "train_sft", "--load_in_4bit", "--load_in_4bit|Try: --lora_rank 16"),
    (
        "tensor_parallel_needs_bf16",
        "train_sft",
        "--ds_tensor_parallel_size 2 --param_dtype fp16",
        "--ds_tensor_parallel_size 2|--param_dtype bf16, not fp16",
    ),
    ("probabilities_match_datasets", "train_sft", "--dataset_probs 0.5,0.5", "--dataset_probs has 2|--dataset names 1"),
    ("probabilities_match_datasets", "train_sft", "--dataset a/b,c/d --dataset_probs 0.5,0.6", "0.5,0.6|sum to 1"),
    ("probabilities_match_datasets", "train_ppo", "--prompt_data_probs half", "--prompt_data_probs 'half'|0.7,0.3"),
    (
        "chat_template_kwargs_are_json",
        "train_sft",
        "--chat_template_kwargs '{a'",
        "--chat_template_kwargs '{a'|not JSON",
    ),
    ("chat_template_kwargs_are_json", "train_sft", "--chat_template_kwargs [1]", "'[1]'|JSON object"),
    ("ring_attention_needs_packing", "train_sft", "--ring_attn_size 2", "--ring_attn_size 2|--packing_samples"),
    (
        "ring_attention_is_our_own",
        "train_sft",
        "--ring_attn_size 2 --packing_samples --attn_implementation eager",
        "--ring_attn_size 2|--attn_implementation eager|Try: --attn_implementation auto",
    ),
    (
        "processes_fill_the_groups",
        "train_sft",
        "--ring_attn_size 2 --packing_samples",
        "--ring_attn_size 2 x --ds_tensor_parallel_size 1|number of processes (1)",
    ),
    ("outputs_can_be_written", "train_sft", "--save_path ./data.jsonl", "--save_path ./data.jsonl|is a file"),
    (
        "outputs_can_be_written",
        "train_sft",
        f"--ckpt_path {'x' * 225}",
        "--ckpt_path|too long|at most 224 bytes, got 225",
    ),
    (
        "paths_are_valid",
        "train_sft",
        f"--dataset {'x' * 5000}",
        "--dataset 'xxx|xxx'... cannot be a path|name is too long",
    ),
    (
        "paths_are_valid",
        "train_ppo",
        "--reward_pretrain ~nobody_here/rm",
        "--reward_pretrain '~nobody_here/rm' cannot be",
    ),
    ("outputs_can_be_written", "train_sft", "--save_path ~nobody_here/rm", "--save_path ~nobody_here/rm: Could not"),
    ("outputs_can_be_written", "train_sft", f"--save_path {'x' * 300}/a", "--save_path|File name too long"),
    ("template_has_a_placeholder", "train_sft", "--input_template User:", "--input_template 'User:'|User: {}"),
    ("numbers_are_in_range", "train_ppo", "--temperature 0", "--temperature is 0.0|above 0|nothing is explored"),
    ("margins_need_the_sigmoid_loss", "train_rm", "--margin_loss --loss logexp", "--loss logexp|Try: --loss sigmoid"),
    ("multiturn_needs_a_chat_template", "train_sft", "--multiturn", "--multiturn|Try: --apply_chat_template"),
    (
        "pretraining_has_no_turns",
        "train_sft",
        "--pretrain_mode --multiturn --apply_chat_template",
        "--pretrain_mode|--multiturn",
    ),
    ("reward_addresses_are_http_or_python", "train_ppo", "--remote_rm_url localhost:5000", "localhost:5000|http://"),
    ("agents_are_python_files", "train_ppo", "--agent_func_path ./agent", "--agent_func_path ./agent is not a .py"),
    (
        "reward_weights_match_models",
        "train_ppo",
        "--reward_pretrain a/b,c/d --reward_weights 1",
        "--reward_weights has 1|names 2",
    ),
    *(
        (
            "groups_have_several_samples",
            "train_ppo",
            f"--advantage_estimator {estimator}",
            f"--advantage_estimator {estimator}|--n_samples_per_prompt is 1|Try: --n_samples_per_prompt 8",
        )
        for estimator in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
    ),
    (
        "oversampling_needs_async",
        "train_ppo",
        "--rollout_batch_size 64 --vllm_generate_batch_size 128",
        "--vllm_generate_batch_size 128|--rollout_batch_size 64|--async_train, --abort_stragglers",
    ),
    (
        "samples_may_wait_for_the_queue",
        "train_ppo",
        "--async_train --async_queue_size 2 --max_staleness 1",
        "--max_staleness 1|--async_queue_size 2|Try: --async_queue_size 1",
    ),
    (
        "ranges_are_intervals",
        "train_ppo",
        "--dynamic_filtering --n_samples_per_prompt 2 --dynamic_filtering_reward_range 1 0",
        "--dynamic_filtering_reward_range 1.0 0.0 is an empty range",
    ),
    (
        "groups_have_several_samples",
        "train_ppo",
        "--dynamic_filtering",
        "--dynamic_filtering|--n_samples_per_prompt is 1",
    ),
    ("thresholds_are_an_interval", "train_ppo", "--vllm_is_truncated_threshold 5 0.5", "5.0 0.5|not a valid interval"),
    ("thresholds_are_an_interval", "train_ppo", "--vllm_is_truncated_threshold 1 2 3", "one or two values, got 3"),
    ("clip_range_is_positive", "train_ppo", "--eps_clip 1.5", "--eps_clip 1.5|[1 - low, 1 + high]"),
    ("clip_range_is_positive", "train_ppo", "--eps_clip_low_high 0.2 -1", "--eps_clip_low_high 0.2 -1.0"),
    ("context_leaves_room", "train_ppo", "--max_new_tokens 2048", "--max_new_tokens 2048|context of 2048"),
    ("overlong_buffer_fits_the_response", "train_ppo", "--overlong_buffer_len 1025", "--overlong_buffer_len 1025|1024"),
    ("ranges_are_intervals", "train_ppo", "--reward_clip_range 1 -1", "--reward_clip_range 1.0 -1.0 is an empty range"),
    ("local_runtime_is_one_device", "train_ppo", "--vllm_num_engines 2", "--runtime local|Try: --runtime ray"),
    ("local_runtime_is_one_device", "train_ppo_ray", "--runtime local --actor_num_nodes 2", "--runtime local"),
    (
        "engines_on_one_gpu_are_whole",
        "train_ppo_ray",
        "--vllm_num_engines 2 --vllm_tensor_parallel_size 2 --vllm_engines_per_gpu 2",
        "--vllm_engines_per_gpu 2|--vllm_tensor_parallel_size 2 spreads an engine over 2 GPUs",
    ),
    (
        "async_engines_have_their_own_devices",
        "train_ppo_ray",
        f"{HYBRID} --async_train --vllm_enable_sleep",
        "--vllm_enable_sleep|--async_train",
    ),
    ("partial_rollout_needs_async", "train_ppo", "--partial_rollout", "--partial_rollout|Try: --async_train"),
    (
        "shared_devices_have_equal_counts",
        "train_ppo_ray",
        "--colocate_actor_ref --actor_num_gpus_per_node 4 --ref_num_gpus_per_node 2",
        "--colocate_actor_ref|actor and ref|4 and 2",
    ),
    (
        "shared_devices_have_equal_counts",
        "train_ppo_ray",
        "--colocate_critic_reward --reward_pretrain ./model --critic_num_gpus_per_node 4 --reward_num_gpus_per_node 2",
        "--colocate_critic_reward|critic and reward|4 and 2",
    ),
    (
        "hybrid_engines_cover_the_policy",
        "train_ppo_ray",
        "--colocate_all_models --vllm_num_engines 2 --vllm_tensor_parallel_size 2",
        "policy's 8 devices|--vllm_num_engines 2 x --vllm_tensor_parallel_size 2 is 4|--actor_num_gpus_per_node 4",
    ),
    (
        "hybrid_engines_cover_the_policy",
        "train_ppo_ray",
        "--colocate_all_models --vllm_num_engines 3 --vllm_tensor_parallel_size 2 --actor_num_nodes 2 "
        "--actor_num_gpus_per_node 3 --ref_num_nodes 2 --ref_num_gpus_per_node 3",
        "2 devices (--vllm_tensor_parallel_size 2)|the 3 that the policy|a multiple of 2 for --actor_num_gpus_per_node",
    ),
    (
        "hybrid_engines_cover_the_policy",
        "train_ppo_ray",
        "--colocate_all_models --vllm_num_engines 1 --vllm_tensor_parallel_size 4 --vllm_pipeline_parallel_size 3",
        "8 devices|--vllm_num_engines 1 x --vllm_tensor_parallel_size 4 x --vllm_pipeline_parallel_size 3 is 12",
    ),
    (
        "local_runtime_is_one_device",
        "train_ppo",
        "--vllm_pipeline_parallel_size 2 --runtime local",
        "--vllm_pipeline_parallel_size 2|Try: --runtime ray",
    ),
    (
        "groups_divide_the_devices",
        "train_ppo",
        "--ring_attn_size 2",
        "--ring_attn_size 2 x --ds_tensor_parallel_size 1|1 device of actor|--actor_num_gpus_per_node 2",
    ),
    (
        "groups_divide_the_devices",
        "train_ppo_ray",
        "--actor_num_gpus_per_node 2 --critic_num_gpus_per_node 1 --ds_tensor_parallel_size 2",
        "1 device of critic",
    ),
    (
        "groups_divide_the_devices",
        "train_ppo_ray",
        "--remote_rm_url= --reward_pretrain ./model --reward_num_gpus_per_node 3 --ring_attn_size 2",
        "3 devices of reward|--reward_num_gpus_per_node 2",
    ),
    *(
        (rule, "train_ppo_ray", f"{PAIR} {added}", parts)
        for rule, added, parts in (
            ("muon_trains_whole_matrices", "--optim muon", "--optim muon|Try: --optim adam"),
            ("muon_trains_whole_matrices", "--critic_optim muon", "--critic_optim muon|Try: --critic_optim adam"),
            ("overlapping_needs_sharded_gradients", "--overlap_comm --zero_stage 1", "--overlap_comm|--zero_stage 2"),
            ("offloading_needs_a_sharded_optimizer", "--adam_offload --zero_stage 0", "--adam_offload|--zero_stage 2"),
            ("hierarchy_needs_sharded_weights", "--zpg 2", "--zpg 2|--zero_stage is 2|Try: --zero_stage 3"),
            ("hierarchy_needs_sharded_weights", "--zpg 3 --zero_stage 3", "--zpg 3 does not divide the 2|Try: --zpg 2"),
            (
                "gradient_sums_use_fp32_or_the_weights_dtype",
                "--grad_accum_dtype fp16",
                "--grad_accum_dtype fp16 with weights in bf16|Try: --grad_accum_dtype fp32",
            ),
            (
                "gradient_sums_use_fp32_or_the_weights_dtype",
                "--grad_accum_dtype fp32 --zero_stage 0",
                "--grad_accum_dtype fp32 with weights in bf16|Try: --zero_stage 2",
            ),
            (
                "gradient_sums_use_fp32_or_the_weights_dtype",
                "--zero_stage 0",
                "--zero_stage 0 sums the gradients of micro-batches in bf16|--zero_stage 1|--grad_accum_dtype bf16",
            ),
            (
                "sleeping_needs_movable_gradients",
                "--zero_stage 1 --deepspeed_enable_sleep",
                "--deepspeed_enable_sleep cannot move|Try: --zero_stage 2",
            ),
            ("fp16_needs_a_loss_scale", "--param_dtype fp16 --zero_stage 0", "--param_dtype fp16|--zero_stage 1"),
            (
                "tensor_parallelism_splits_plain_layers",
                "--ds_tensor_parallel_size 2 --lora_rank 4",
                "--ds_tensor_parallel_size 2|expected --lora_rank 0, got 4",
            ),
            (
                "four_bit_weights_are_not_sharded",
                "--load_in_4bit --lora_rank 4 --zero_stage 3",
                "--load_in_4bit|Try: --zero_stage 2",
            ),
            ("compiled_layers_are_not_sharded", "--deepcompile --zero_stage 3", "--deepcompile|--zero_stage 2"),
            ("local_backend_is_one_process", "--backend local", "--backend local|2 processes|Try: --backend fsdp"),
            ("muon_trains_whole_matrices", "--backend fsdp --optim muon", "--optim muon|FSDP|Try: --optim adam"),
            (
                "fsdp_divides_experts",
                "--expert_parallel_size 2 --backend deepspeed",
                "--expert_parallel_size 2|--backend is deepspeed|Try: --backend fsdp",
            ),
            (
                "fsdp_divides_experts",
                "--expert_parallel_size 2 --backend fsdp --lora_rank 4",
                "--expert_parallel_size 2|expected --lora_rank 0, got 4",
            ),
            (
                "fsdp_divides_experts",
                "--expert_parallel_size 2 --backend fsdp --ds_tensor_parallel_size 2",
                "--expert_parallel_size 2 cannot be combined with --ds_tensor_parallel_size 2|"
                "Try: --ds_tensor_parallel_size 1",
            ),
            (
                "fsdp_divides_experts",
                "--expert_parallel_size 4 --backend fsdp",
                "--expert_parallel_size 4 does not divide the number of processes (2)|Try: --expert_parallel_size 2",
            ),
            (
                "four_bit_weights_are_not_sharded",
                "--backend fsdp --load_in_4bit --lora_rank 4",
                "--load_in_4bit|--backend fsdp cannot shard|Try: --backend deepspeed",
            ),
        )
    ),
    (
        "local_backend_is_one_process",
        "train_sft",
        "--backend local --load_checkpoint --use_ds_universal_ckpt",
        "--use_ds_universal_ckpt|--backend is local|Try: --backend deepspeed",
    ),
    ("sharded_policies_have_other_engines", "train_ppo", "--backend fsdp", "--backend fsdp|Try: --runtime ray"),
    ("engines_on_ray_are_vllm", "batch_inference", "--vllm_num_engines 2", "--eval_task generate_vllm|on Ray"),
    (
        "numbers_are_in_range",
        "batch_inference",
        "--eval_task generate_vllm --vllm_num_engines 0",
        "--vllm_num_engines is 0|above 0",
    ),
    (
        "post_processors_need_rewards",
        "batch_inference",
        "--post_processor rs",
        "--post_processor rs|--eval_task generate",
    ),
    (
        "reward_template_has_its_placeholders",
        "batch_inference",
        "--eval_task rm --post_processor csft --reward_template {input}",
        "'{input}'|{reward}",
    ),
    *(
        ("revisions_are_not_empty", command, words, f"--{flag} is empty|Try: without --{flag} for the default branch")
        for command, words, flag in [
            ("train_sft", "--pretrain org/model --revision=", "revision"),
            ("serve_rm", "--reward_pretrain org/model --revision ' '", "revision"),
            ("train_ppo", "--prompt_data org/a --dataset_revision ''", "dataset_revision"),
            ("train_sft", "--eval_dataset org/a --eval_revision ,", "eval_revision"),
        ]
    ),
    (
        "revision_becomes_part_of_the_name",
        "train_sft",
        "--revision v1",
        "--revision v1 needs a model on a hub|--pretrain ./model is a folder|Try: without --revision",
    ),
    (
        "revision_becomes_part_of_the_name",
        "train_sft",
        "--pretrain org/model@v1 --revision v2",
        "--revision v2|--pretrain org/model@v1, which already contains a revision",
    ),
    (
        "models_with_a_revision_are_on_a_hub",
        "train_ppo",
        "--reward_pretrain org/rm@v1,./model@v1",
        "--reward_pretrain ./model@v1: ./model is a folder on this machine, which has no revisions|Try: ",
    ),
    (
        "models_with_a_revision_are_on_a_hub",
        "train_dpo",
        "--ref_pretrain model@v1",
        "--ref_pretrain model@v1: model is a folder on this machine",
    ),
    ("models_with_a_revision_are_on_a_hub", "train_sft", "--pretrain org/model@", "ends with @ but names no revision"),
    (
        "each_hub_dataset_has_a_revision",
        "train_sft",
        "--dataset_revision v1",
        "--dataset_revision needs a dataset on a hub|--dataset ./data.jsonl is on this machine",
    ),
    (
        "each_hub_dataset_has_a_revision",
        "train_ppo",
        "--prompt_data org/a,./data.jsonl,org/b@part --dataset_revision v1",
        "--dataset_revision has 1 value, but --prompt_data has 2 hub names",
    ),
    (
        "each_hub_dataset_has_a_revision",
        "train_sft",
        "--eval_dataset org/a --eval_revision v1,v2",
        "--eval_revision has 2 values, but --eval_dataset has 1",
    ),
    ("model_folders_exist", "train_sft", "--pretrain ./nowhere", "--pretrain ./nowhere: no such folder|org/model"),
    ("model_folders_exist", "train_sft", "--pretrain ./modle", "--pretrain ./modle: no such folder|Try: ./model"),
    ("model_folders_exist", "train_sft", "--pretrain runs/sft/model", "--pretrain runs/sft/model: no such folder"),
    ("model_folders_exist", "train_sft", "--pretrain model_/", "--pretrain model_/: no such folder|Try: ./model"),
    (
        "model_folders_exist",
        "train_ppo",
        "--reward_pretrain ./model,./gone",
        "--reward_pretrain ./gone: no such folder",
    ),
    ("model_folders_exist", "train_sft", "--pretrain ./data.jsonl", "./data.jsonl is a file"),
    ("model_folders_exist", "train_sft", "--pretrain ./empty", "./empty has no config.json"),
    ("model_folders_exist", "serve_rm", "--reward_pretrain ./adapter", "./adapter is a LoRA adapter|lora_combiner"),
    (
        "evaluation_data_has_one_source",
        "train_sft",
        "--eval_dataset ./data.jsonl --eval_size 0.1",
        "--eval_size 0.1 conflicts with --eval_dataset ./data.jsonl|Try: only one of them",
    ),
    ("evaluation_data_has_one_source", "train_ppo", "--eval_split 0.05", "name of a split|Try: --eval_size 0.05"),
    ("numbers_are_in_range", "train_dpo", "--eval_size inf", "--eval_size is inf|a fraction below 1 or a whole number"),
    ("numbers_are_in_range", "train_dpo", "--eval_size 2.5", "--eval_size is 2.5|a fraction below 1 or a whole number"),
    ("dataset_files_exist", "train_sft", "--dataset ./data.jsonl,gone.jsonl", "--dataset gone.jsonl: no such file"),
    ("dataset_files_exist", "train_sft", "--dataset ./dta.jsonl", "no such file or folder. Try: ./data.jsonl"),
    ("dataset_files_exist", "train_sft", "--dataset my/own/rows", "--dataset my/own/rows: no such file or folder"),
    ("dataset_files_exist", "train_sft", "--eval_dataset ./gone@dir", "--eval_dataset ./gone: no such file or folder"),
    ("named_files_exist", "train_ppo", "--remote_rm_url gone.py", "--remote_rm_url gone.py: no such file"),
    ("named_files_exist", "train_ppo", "--remote_rm_url rewrd.py", "rewrd.py: no such file. Try: ./reward.py"),
    ("named_files_exist", "train_ppo", "--agent_func_path ./gone.py", "--agent_func_path ./gone.py: no such file"),
    (
        "replay_is_of_another_run",
        "train_ppo",
        "--run_dir ./run --replay run/rollouts",
        "--replay run/rollouts|writes its rollouts to",
    ),
    ("replay_is_of_another_run", "train_ppo", "--replay ./gone", "--replay ./gone: no such folder"),
    ("replay_is_of_another_run", "train_ppo", "--replay .", "--replay . has no step_*.parquet"),
    ("named_files_exist", "interactive_chat", "--ta_prompt ./gone.txt", "--ta_prompt ./gone.txt: no such file"),
    ("rows_go_to_a_file", "batch_inference", "--output_path ./model", "is a folder|--output_path model/rows.jsonl"),
    ("merging_keeps_its_sources", "lora_combiner", "--output_path ./model", "is the same as --model_path|./merged"),
    ("repository_name_is_valid", "train_sft", "--push_to_hub 'a model'", "--push_to_hub a model|my-org/my-model"),
    ("repository_name_is_valid", "export", "--push_to_hub a/b/c", "--push_to_hub a/b/c is not the name"),
    ("uploading_needs_a_login", "train_ppo", "--push_to_hub org/name", "needs a login|hf auth login"),
    ("something_is_exported", "export", "--output_path=", "neither --output_path nor --push_to_hub|--gguf q8_0"),
    ("something_is_exported", "export", "--output_path= --gguf f16", "--gguf needs a folder to write to"),
    ("something_is_exported", "export", "--output_path ./data.jsonl/x", "data.jsonl is a file"),
    ("input_template_has_a_placeholder", "export", "--gguf f16 --input_template Q:", "--input_template 'Q:' has no {}"),
    ("source_is_a_model_or_an_adapter", "export", "--pretrain ./gone", "--pretrain ./gone: no such folder"),
    (
        "source_is_a_model_or_an_adapter",
        "export",
        "--pretrain ./empty",
        "./empty is not a model: it has no config.json",
    ),
    ("exporting_keeps_its_source", "export", "--output_path ./model", "is the same as --pretrain|./exported"),
    (
        "adapter_folder_exists",
        "lora_combiner",
        "--lora_path ./model",
        "--lora_path ./model has no adapter_config.json",
    ),
]

CHANGED = [  # rule, command, added flags, parts of the line, the changed flag, its new value
    *(
        ("revision_becomes_part_of_the_name", command, words, f"--revision v1: --{flag} is {value}", flag, value)
        for command, words, flag, value in (
            ("train_sft", "--pretrain org/model --revision v1", "pretrain", "org/model@v1"),
            ("serve_rm", "--reward_pretrain org/model --revision v1", "reward_pretrain", "org/model@v1"),
            ("lora_combiner", "--model_path org/model --revision v1", "model_path", "org/model@v1"),
        )
    ),
    (
        "revision_becomes_part_of_the_name",
        "train_ppo",
        "--pretrain org/model --remote_rm_url= --reward_pretrain org/rm,org/model --revision v1",
        "--pretrain is org/model@v1|--reward_pretrain is org/rm,org/model@v1",
        "reward_pretrain",
        "org/rm,org/model@v1",
    ),
    (
        "the_same_dataset_has_the_same_revision",
        "train_sft",
        "--dataset org/a --eval_dataset org/a --eval_split test --dataset_revision v1",
        "--eval_revision is set to v1",
        "eval_revision",
        "v1",
    ),
    (
        "generate_max_len_within_max_len",
        "train_ppo",
        "--max_len 4096 --generate_max_len 512",
        "--generate_max_len 512|--max_new_tokens",
        "max_new_tokens",
        512,
    ),
    ("empty_template_is_none", "train_sft", "--input_template=", "--input_template is empty", "input_template", None),
    ("empty_template_is_none", "train_sft", """--input_template '""'""", "is empty", "input_template", None),
    ("empty_template_is_none", "batch_inference", """--input_template "''" """, "is empty", "input_template", None),
    (
        "group_estimators_do_not_discount",
        "train_ppo",
        "--advantage_estimator group_norm --n_samples_per_prompt 2 --gamma 0.9",
        "--gamma 0.9 is set to 1: group_norm",
        "gamma",
        1.0,
    ),
    (
        "only_gae_has_a_critic",
        "train_ppo",
        "--advantage_estimator reinforce --critic_pretrain ./model",
        "--critic_pretrain is ignored: --advantage_estimator reinforce",
        "critic_pretrain",
        None,
    ),
    (
        "only_gae_has_a_critic",
        "train_ppo",
        "--advantage_estimator reinforce --freezing_actor_steps 2",
        "--freezing_actor_steps is ignored: --advantage_estimator reinforce uses no critic",
        "freezing_actor_steps",
        -1,
    ),
    (
        "ring_attention_is_our_own",
        "train_ppo_ray",
        "--vllm_num_engines 8 --ring_attn_size 2 --packing_samples --flash_attn",
        "--attn_implementation flash_attention_2 is set to auto: --ring_attn_size",
        "attn_implementation",
        "auto",
    ),
    (
        "rings_and_dynamic_batches_pack",
        "train_ppo_ray",
        "--vllm_num_engines 8 --ring_attn_size 2",
        "--packing_samples is turned on: --ring_attn_size",
        "packing_samples",
        True,
    ),
    (
        "rings_and_dynamic_batches_pack",
        "train_ppo",
        "--use_dynamic_batch",
        "--packing_samples is turned on: --use_dynamic_batch",
        "packing_samples",
        True,
    ),
    (
        "sleep_needs_colocation",
        "train_ppo_ray",
        "--vllm_num_engines 8 --vllm_enable_sleep",
        "--vllm_enable_sleep is turned off: without --colocate_all_models",
        "vllm_enable_sleep",
        False,
    ),
]

SAID = [  # rule, command, added flags, parts of the line
    (
        "packing_needs_our_attention",
        "train_sft",
        "--packing_samples --attn_implementation eager",
        "--attn_implementation eager does not support packing|Try: --attn_implementation auto",
    ),
    (
        "packing_needs_our_attention",
        "train_ppo",
        "--packing_samples --attn_implementation sdpa",
        "--attn_implementation sdpa does not support packing",
    ),
    (
        "log_probs_can_be_compared",
        "train_ppo_ray",
        "--vllm_num_engines 1 --temperature 0.7 --top_p 0.9",
        "--top_p 0.9 excludes tokens|checksums alone",
    ),
    ("template_has_line_breaks", "train_sft", r"--input_template 'User: {}\nBot: '", "--input_template|backslash"),
    ("resuming_needs_checkpoints", "train_sft", "--load_checkpoint --disable_ds_ckpt", "--disable_ds_ckpt"),
    ("micro_batches_divide_the_batch", "train_sft", "--train_batch_size 12", "--train_batch_size 12|8 x 1|smaller"),
    ("kl_estimator_suits_its_place", "train_ppo", "--use_kl_loss", "--use_kl_loss with --kl_estimator k1"),
    ("kl_estimator_suits_its_place", "train_ppo", "--kl_estimator k3", "--kl_estimator k3|--use_kl_loss"),
    ("gspo_clips_narrowly", "train_ppo", "--policy_loss_type gspo", "--eps_clip_low_high 3e-4 4e-4"),
    ("evaluation_needs_eval_steps", "train_ppo", "--eval_dataset ./data.jsonl", "--eval_dataset|--eval_steps is -1"),
    ("evaluation_needs_eval_steps", "train_ppo", "--eval_size 1", "--eval_size|--eval_steps is -1"),
    (
        "async_engines_have_their_own_devices",
        "train_ppo_ray",
        f"{HYBRID} --async_train --enable_vllm_is_correction",
        "--colocate_all_models with --async_train",
    ),
    (
        "old_samples_are_corrected",
        "train_ppo",
        "--async_train",
        "up to 1 update old: importance correction is on (--enable_vllm_is_correction false switches it off)",
    ),
    (
        "old_samples_are_corrected",
        "train_ppo",
        "--async_train --async_queue_size 2 --enable_vllm_is_correction false",
        "warning: |up to 2 updates old|only the clip range",
    ),
    (
        "old_samples_are_corrected",
        "train_ppo",
        "--async_train --enable_vllm_is_correction false --top_p 0.9 --temperature 0.7",
        "warning: |nothing corrects for their age",
    ),
    ("empty_queue_is_synchronous", "train_ppo", "--async_train --async_queue_size 0", "--async_queue_size 0"),
    (
        "correction_needs_the_whole_distribution",
        "train_ppo",
        "--enable_vllm_is_correction --top_p 0.98",
        "over the whole vocabulary, although --top_p 0.98 excludes tokens",
    ),
    ("engines_have_a_device", "train_ppo_ray", "--actor_num_gpus_per_node 2", "--vllm_num_engines is not given"),
    (
        "scoring_batches_cover_the_devices",
        "train_ppo_ray",
        "--vllm_num_engines 8 --rollout_batch_size 16 --train_batch_size 16",
        "too few scoring micro-batches: 2 for 8 devices",
    ),
    ("rollouts_divide_into_steps", "train_ppo", "--rollout_batch_size 64", "64 samples|--train_batch_size 128"),
    (
        "rollouts_divide_into_steps",
        "train_ppo",
        "--rollout_batch_size 200",
        "200 samples, so its last step has 72, not --train_batch_size 128",
    ),
]
BY_A_LAUNCHER = {"launched_processes_become_devices"}  # tested with the environment of a launcher
# tested in a Python without packages
WITHOUT_EXTRAS = {"needed_extras_are_installed", "serving_the_page_needs_its_extra"}


@pytest.fixture
def run(workspace):
    """Return a function that gives a command's checked config and the lines that its rules printed."""

    def run(command, added=""):
        lines = []
        config = parse(COMMANDS[command], shlex.split(f"{VALID[command]} {added}"), environ={})
        return check(config, lines.append), lines

    return run


def holds(message, parts):
    return [part for part in parts.split("|") if part not in message] == []


def test_every_rule_is_tested():
    known = {rule.__name__ for rules in RULES.values() for rule in rules}
    assert {case[0] for case in [*REFUSED, *CHANGED, *SAID]} | WITHOUT_EXTRAS | BY_A_LAUNCHER == known


def test_every_command_has_rules():
    assert RULES.keys() == set(COMMANDS.values())


@pytest.mark.parametrize("command", VALID)
def test_a_valid_command_passes_unchanged_and_silently(run, command):
    config, lines = run(command)
    assert config == parse(COMMANDS[command], shlex.split(VALID[command]), environ={})
    assert lines == []


@pytest.mark.parametrize(("rule", "command", "added", "parts"), REFUSED)
def test_a_rule_rejects_a_command(run, rule, command, added, parts):
    with pytest.raises((ConfigError, MissingExtraError)) as caught:
        run(command, added)
    assert holds(str(caught.value), parts), caught.value
    assert "\n" not in str(caught.value)
    assert rule in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize(("rule", "command", "added", "parts", "flag", "value"), CHANGED)
def test_a_rule_changes_a_value_and_reports_it(run, rule, command, added, parts, flag, value):
    config, lines = run(command, added)
    assert flag_values(config)[flag] == value
    assert len(lines) == 1
    assert holds(lines[0], parts), lines


@pytest.mark.parametrize(("rule", "command", "added", "parts"), SAID)
def test_a_rule_prints_a_line_and_changes_nothing(run, rule, command, added, parts):
    config, lines = run(command, added)
    assert config == parse(COMMANDS[command], shlex.split(f"{VALID[command]} {added}"), environ={})
    assert len(lines) == 1
    assert holds(lines[0], parts), lines


@pytest.mark.parametrize("command", VALID)
def test_every_default_is_in_its_range(command):
    for name, item in flags_of(COMMANDS[command]).items():
        values = item.default if isinstance(item.default, tuple) else (item.default,)
        if item.within is not None and item.default is not None:
            assert all(item.within.holds(value) for value in values), name


@pytest.mark.parametrize("command", VALID)
def test_a_flag_needs_another_flag_of_its_command(command):
    flags = flags_of(COMMANDS[command])
    assert {name for item in flags.values() for name in item.needed} <= flags.keys()


# Flags that upstream rejects and we accept.


@pytest.mark.parametrize(
    "added",
    [
        "--packing_samples",  # without engines
        "--eval_dataset ./data.jsonl --eval_steps 5 --remote_rm_url= --reward_pretrain ./model",
        "--eval_size 4 --eval_steps 5 --eval_temperature 0.5",
        "--dynamic_filtering --n_samples_per_prompt 2 --remote_rm_url= --reward_pretrain ./model",
        "--async_train --async_queue_size 4 --enable_vllm_is_correction",
        "--enable_vllm_is_correction --vllm_is_truncated_threshold 2",
        "--remote_rm_url= --reward_pretrain ./model,./model --reward_weights 1 0.5",
        "--stop_properly_penalty_coef -1",
    ],
)
def test_flags_that_only_upstream_rejects_pass_silently(run, added):
    assert run("train_ppo", added)[1] == []


def test_a_missing_positional_argument_is_named_as_in_the_help():
    with pytest.raises(
        ConfigError, match=r"^RUN_DIR is not given, but this command needs it. Try: openrlhf view ./ckpt$"
    ):
        check(parse(COMMANDS["view"], [], environ={}))


def test_a_hub_name_is_not_looked_up_on_disk(run):
    assert run("train_sft", "--pretrain org/model --dataset org/data --eval_dataset json@./x")[1] == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "0.0.0.0 --api_key k"])
def test_a_server_for_this_machine_or_with_a_key_may_start(run, host):
    assert run("serve_rm", f"--host {host}")[1] == []


@pytest.mark.parametrize(("command", "flag"), [("serve_rm", "api_key"), ("train_ppo", "reward_api_key")])
def test_keys_come_from_the_environment_unless_they_are_given(command, flag, capsys):
    environ = {"OPENRLHF_RM_API_KEY": "from-outside"}
    argv = shlex.split(VALID[command])
    assert flag_values(parse(COMMANDS[command], argv, environ=environ))[flag] == "from-outside"
    assert flag_values(parse(COMMANDS[command], [*argv, f"--{flag}", "given"], environ=environ))[flag] == "given"
    assert capsys.readouterr().err == ""


# processes


def test_a_launcher_with_enough_processes_fills_the_groups(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert run("train_sft", "--ring_attn_size 2 --ds_tensor_parallel_size 2 --packing_samples")[1] == []


def test_three_processes_cannot_share_a_batch_evenly(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    (line,) = run("train_sft")[1]
    assert "--train_batch_size 128 is not a multiple of 8 x 3 devices" in line


def test_rules_of_deepspeed_apply_to_several_processes_only(run, monkeypatch):
    added = "--optim muon --overlap_comm --zero_stage 0 --zpg 2"
    said = ["--zero_stage 0, --zpg 2 and --overlap_comm have no effect in one process"]
    assert run("train_sft", added)[1] == said
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--optim muon"):
        run("train_sft", added)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="--optim muon"):
        run("train_sft", f"{added} --load_checkpoint --use_ds_universal_ckpt")


def test_rules_of_deepspeed_do_not_apply_to_fsdp(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("train_sft", "--backend fsdp --deepcompile --adam_offload --param_dtype fp16")[1] == []
    assert run("train_sft", "--backend fsdp --ds_tensor_parallel_size 2 --lora_rank 4 --param_dtype fp32")[1] == []


@pytest.mark.parametrize("added", ["--grad_accum_dtype bf16", "--param_dtype fp32", "--device cpu"])
def test_without_zero_gradients_may_be_summed_in_the_weights_dtype(run, monkeypatch, added):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("train_sft", f"--zero_stage 0 {added}")[1] == []


def test_processes_of_a_launcher_become_devices_of_every_model(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config, lines = run("train_ppo", "--vllm_num_engines 4 --reward_num_gpus_per_node 2")
    assert "4 launcher processes" in lines[0]
    assert [num_devices(config, role) for role in ROLES] == [4, 4, 4, 2]
    assert (config.placement.colocate_all_models, resolve_runtime(config)) == (True, "ray")
    config, _ = run("train_ppo_ray", "--runtime ray --vllm_num_engines 4")
    assert [num_devices(config, role) for role in ROLES] == [4, 4, 4, 4]
    config, lines = run("train_ppo_ray", "--vllm_num_engines 8 --actor_num_gpus_per_node 2")
    assert lines[0] == "the first of 4 launcher processes runs the Ray driver; the other processes exit now"
    assert not config.placement.colocate_all_models


def test_processes_of_a_launcher_on_several_nodes_need_ray(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_SIZE", "8")
    with pytest.raises(ConfigError) as caught:
        run("train_ppo")
    assert holds(
        str(caught.value), "16 processes on 2 nodes|python -m openrlhf.cli.train_ppo_ray --colocate_all_models"
    )
    assert holds(str(caught.value), "--critic_num_nodes 2 --critic_num_gpus_per_node 8")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "runs the Ray driver" in run("train_ppo_ray", "--vllm_num_engines 8")[1][0]


def test_a_local_run_rejects_several_launched_processes(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--runtime local runs in one process, but a launcher started 2"):
        run("train_ppo_ray", "--runtime local")


# the runtime


def rl(added="", command="train_ppo_ray"):
    return parse(COMMANDS[command], shlex.split(f"{RL} {added}"), environ={})


@pytest.mark.parametrize(
    ("added", "environ", "runtime"),
    [
        ("", {}, "local"),
        ("--vllm_num_engines 1", {}, "local"),
        ("--vllm_num_engines 0", {}, "local"),
        ("--actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1", {}, "local"),
        ("--vllm_num_engines 2", {}, "ray"),
        ("--vllm_tensor_parallel_size 2", {}, "ray"),
        ("--reward_num_gpus_per_node 2", {}, "ray"),
        ("--critic_num_nodes 2", {}, "ray"),
        ("", {"RAY_ADDRESS": "10.0.0.1:6379"}, "ray"),
        ("", {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, "ray"),
        ("--runtime local", {"RAY_ADDRESS": "10.0.0.1:6379"}, "local"),
        ("--runtime ray", {}, "ray"),
    ],
)
def test_auto_depends_on_the_given_flags(added, environ, runtime):
    assert resolve_runtime(rl(added), environ) == runtime


def test_train_ppo_stays_local_if_there_is_a_cluster():
    assert resolve_runtime(rl(command="train_ppo"), {"RAY_ADDRESS": "auto"}) == "local"


def test_an_unset_count_is_eight_on_ray_and_one_locally():
    assert num_devices(rl(), "actor", {}) == 1
    assert num_devices(rl(), "actor", {"RAY_ADDRESS": "auto"}) == 8
    assert num_devices(rl("--actor_num_nodes 2"), "actor", {}) == 16
    assert num_devices(rl("--actor_num_nodes 2 --actor_num_gpus_per_node 4"), "actor", {}) == 8
    assert num_devices(rl("--actor_num_gpus_per_node 4"), "ref", {}) == 8


def test_episodes_are_limited_per_engine_or_together():
    per_engine = rl("--vllm_num_engines 4 --max_episodes_per_engine 128")
    assert most_episodes(per_engine, {}) == 512
    assert most_episodes(replace_flags(per_engine, vllm_engines_per_gpu=2), {}) == 1024
    assert most_episodes(rl("--max_episodes_per_engine 128"), {}) == 128  # the one engine of a local run
    assert most_episodes(rl("--actor_num_gpus_per_node 2 --max_episodes_per_engine 128"), {}) == 256
    assert most_episodes(rl("--max_episodes_per_engine 128 --max_concurrent_episodes 100"), {}) == 100
    assert most_episodes(rl(), {}) is None


def test_the_critic_starts_from_its_flag_then_the_reward_model_then_the_policy():
    assert critic_model(rl("--critic_pretrain c --remote_rm_url= --reward_pretrain r")) == "c"
    assert critic_model(rl("--remote_rm_url= --reward_pretrain r,s")) == "r"
    assert critic_model(rl("--reward_pretrain r")) == "./model"  # the reward comes from elsewhere
    assert critic_model(rl("--advantage_estimator reinforce")) is None


def test_a_single_clip_applies_to_both_sides():
    assert rl("--eps_clip 0.3").policy.clip_range == (0.3, 0.3)
    assert rl("--eps_clip 0.3 --eps_clip_low_high 0.1 0.2").policy.clip_range == (0.1, 0.2)


def test_a_single_threshold_is_the_upper_bound():
    assert rl("--vllm_is_truncated_threshold 2").policy.correction_range == (0.0, 2.0)


def test_server_addresses_are_a_list_and_a_file_is_not_one():
    assert rl("--remote_rm_url http://a,http://b").rewards.reward_servers == ("http://a", "http://b")
    assert rl().rewards.reward_servers == ()
    assert rl().rewards.reward_file == "./reward.py"


# Optional packages.

NEEDED = {  # command and flags -> package, extra
    "train_ppo_ray --vllm_num_engines 8": ("ray", "ray"),
    "train_ppo --vllm_num_engines 1": ("vllm", "vllm"),
    "train_sft --load_in_4bit --lora_rank 8": ("bitsandbytes", "qlora"),
    "train_sft --use_wandb key": ("wandb", "wandb"),
    "train_sft --use_trackio toys": ("trackio", "trackio"),
    "train_dpo --use_liger_kernel": ("liger_kernel", "liger"),
    "interactive_chat --load_in_4bit": ("bitsandbytes", "qlora"),
    "batch_inference --eval_task generate_vllm": ("vllm", "vllm"),
    "serve_rm --port 5001": ("fastapi", "serve"),
    "view --port 5001": ("fastapi", "view"),
}
BARE_PYTHON = """
import shlex, sys
sys.path.insert(0, sys.argv[1])
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.errors import MissingExtraError
for line in sys.stdin:
    command, *argv = shlex.split(line)
    try:
        check(parse(COMMANDS[command], argv, environ={}))
    except MissingExtraError as error:
        print(error)
"""


def test_a_missing_extra_gives_its_pip_command(workspace):
    """Run in a Python without any installed package (-S), which also shows that flags and rules need none."""
    words = [asked.split(maxsplit=1) for asked in NEEDED]
    asked = "\n".join(f"{command} {VALID[command]} {added}" for command, added in words)
    root = str(Path(openrlhf.__file__).parents[1])
    bare = [sys.executable, "-S", "-I", "-c", BARE_PYTHON, root]
    done = subprocess.run(bare, input=asked, capture_output=True, text=True, check=True, timeout=300)
    said = done.stdout.splitlines()
    assert len(said) == len(NEEDED), done
    for line, (package, extra) in zip(said, NEEDED.values(), strict=True):
        assert f"needs {package}, which is not installed. Try: pip install -e '{root}[{extra}]'" in line


def test_the_requirements_of_an_extra_include_those_of_other_extras():
    declared = [
        "torch>=2",
        'vllm>=0.26; extra == "vllm-latest"',
        'openrlhf[ray]; extra == "vllm-latest"',
        'ray[default]>=2.60; extra == "ray"',
    ]
    assert list(requirements_of("vllm_latest", declared)) == ["vllm>=0.26", "ray[default]>=2.60"]
    assert list(requirements_of(None, declared)) == ["torch>=2"]


def test_the_pip_command_works_in_any_folder(tmp_path):
    assert install_command("view", tmp_path) == "python -m pip install fastapi uvicorn"  # site-packages
    assert install_command(root=tmp_path).startswith("python -m pip install 'torch>=")
    (tmp_path / "pyproject.toml").touch()
    assert install_command("view", tmp_path) == f"pip install -e '{tmp_path}[view]'"
