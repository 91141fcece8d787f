#!/usr/bin/env bash
# PPO on Ray with separate devices: policy and reference share ACTOR_GPUS, critic and reward model share CRITIC_GPUS, and
# ENGINES vLLM engines with ENGINE_TP devices each generate. The defaults below add up to 8 GPUs.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train_ppo_ray \
    --actor_num_nodes "${ACTOR_NODES:-1}" \
    --actor_num_gpus_per_node "${ACTOR_GPUS:-2}" \
    --ref_num_nodes "${ACTOR_NODES:-1}" \
    --ref_num_gpus_per_node "${ACTOR_GPUS:-2}" \
    --colocate_actor_ref \
    --critic_num_nodes "${CRITIC_NODES:-1}" \
    --critic_num_gpus_per_node "${CRITIC_GPUS:-2}" \
    --reward_num_nodes "${CRITIC_NODES:-1}" \
    --reward_num_gpus_per_node "${CRITIC_GPUS:-2}" \
    --colocate_critic_reward \
    --vllm_num_engines "${ENGINES:-2}" \
    --vllm_tensor_parallel_size "${ENGINE_TP:-2}" \
    --vllm_sync_backend nccl \
    --enforce_eager \
    --pretrain "${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}" \
    --reward_pretrain "${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}" \
    --prompt_data "${PROMPTS:-OpenRLHF/prompt-collection-v0.1}" \
    --input_key "${INPUT_KEY:-context_messages}" \
    --apply_chat_template \
    --max_samples "${MAX_SAMPLES:-100000}" \
    --prompt_max_len "${PROMPT_LEN:-1024}" \
    --generate_max_len "${ANSWER_LEN:-1024}" \
    --rollout_batch_size "${ROLLOUT_BATCH:-1024}" \
    --micro_rollout_batch_size "${MICRO_ROLLOUT_BATCH:-16}" \
    --train_batch_size "${TRAIN_BATCH:-128}" \
    --micro_train_batch_size "${MICRO_BATCH:-8}" \
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
