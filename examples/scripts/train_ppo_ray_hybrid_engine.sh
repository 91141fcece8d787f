#!/usr/bin/env bash
# PPO on Ray with the hybrid engine: all models and the vLLM engines share the same ACTOR_GPUS devices and take turns.
# ENGINES x ENGINE_TP must be ACTOR_NODES x ACTOR_GPUS. Other estimators: append --advantage_estimator reinforce, rloo,
# reinforce_baseline, group_norm (GRPO) or dr_grpo; all but the first need SAMPLES above 1.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train_ppo_ray \
    --actor_num_nodes "${ACTOR_NODES:-1}" \
    --actor_num_gpus_per_node "${ACTOR_GPUS:-8}" \
    --ref_num_nodes "${ACTOR_NODES:-1}" \
    --ref_num_gpus_per_node "${ACTOR_GPUS:-8}" \
    --critic_num_nodes "${ACTOR_NODES:-1}" \
    --critic_num_gpus_per_node "${ACTOR_GPUS:-8}" \
    --reward_num_nodes "${ACTOR_NODES:-1}" \
    --reward_num_gpus_per_node "${ACTOR_GPUS:-8}" \
    --colocate_all_models \
    --vllm_num_engines "${ENGINES:-4}" \
    --vllm_tensor_parallel_size "${ENGINE_TP:-2}" \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_sync_backend nccl \
    --enforce_eager \
    --vllm_enable_sleep \
    --deepspeed_enable_sleep \
    --pretrain "${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}" \
    --reward_pretrain "${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}" \
    --prompt_data "${PROMPTS:-OpenRLHF/prompt-collection-v0.1}" \
    --input_key "${INPUT_KEY:-context_messages}" \
    --apply_chat_template \
    --max_samples "${MAX_SAMPLES:-100000}" \
    --prompt_max_len "${PROMPT_LEN:-1024}" \
    --generate_max_len "${ANSWER_LEN:-1024}" \
    --rollout_batch_size "${ROLLOUT_BATCH:-1024}" \
    --train_batch_size "${TRAIN_BATCH:-128}" \
    --use_dynamic_batch \
    --n_samples_per_prompt "${SAMPLES:-1}" \
    --max_epochs 1 \
    --actor_learning_rate 5e-7 \
    --critic_learning_rate 9e-6 \
    --init_kl_coef 0.01 \
    --normalize_reward \
    --zero_stage 3 \
    --param_dtype bf16 \
    --packing_samples \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-$PWD/checkpoint/llama3-8b-rlhf}" \
    --ckpt_path "${CKPT_PATH:-$PWD/checkpoint/llama3-8b-rlhf-ckpt}" \
    --save_hf_ckpt \
    "$@"
