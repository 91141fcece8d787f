#!/usr/bin/env bash
# PPO (hybrid engine) with the reward from a Python function: REWARD_FUNC is a file with reward_func(queries, prompts,
# labels), and LABEL_KEY is the field of a row that it receives as the label. examples/rewards has more of them.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train_ppo_ray \
    --actor_num_nodes "${ACTOR_NODES:-1}" \
    --actor_num_gpus_per_node "${ACTOR_GPUS:-8}" \
    --ref_num_nodes "${ACTOR_NODES:-1}" \
    --ref_num_gpus_per_node "${ACTOR_GPUS:-8}" \
    --critic_num_nodes "${ACTOR_NODES:-1}" \
    --critic_num_gpus_per_node "${ACTOR_GPUS:-8}" \
    --colocate_all_models \
    --vllm_num_engines "${ENGINES:-4}" \
    --vllm_tensor_parallel_size "${ENGINE_TP:-2}" \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_sync_backend nccl \
    --enforce_eager \
    --vllm_enable_sleep \
    --deepspeed_enable_sleep \
    --pretrain "${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}" \
    --remote_rm_url "${REWARD_FUNC:-$scripts/reward_func.py}" \
    --prompt_data "${PROMPTS:-openai/gsm8k@main}" \
    --input_key "${INPUT_KEY:-question}" \
    --label_key "${LABEL_KEY:-answer}" \
    --apply_chat_template \
    --max_samples "${MAX_SAMPLES:-100000}" \
    --prompt_max_len "${PROMPT_LEN:-1024}" \
    --generate_max_len "${ANSWER_LEN:-1024}" \
    --rollout_batch_size "${ROLLOUT_BATCH:-128}" \
    --train_batch_size "${TRAIN_BATCH:-1024}" \
    --use_dynamic_batch \
    --n_samples_per_prompt "${SAMPLES:-8}" \
    --max_epochs 1 \
    --actor_learning_rate 5e-7 \
    --critic_learning_rate 9e-6 \
    --init_kl_coef 1e-3 \
    --zero_stage 3 \
    --param_dtype bf16 \
    --packing_samples \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-$PWD/checkpoint/llama3-8b-rft}" \
    --ckpt_path "${CKPT_PATH:-$PWD/checkpoint/llama3-8b-rft-ckpt}" \
    --save_hf_ckpt \
    "$@"
