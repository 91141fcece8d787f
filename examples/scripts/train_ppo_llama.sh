#!/usr/bin/env bash
# PPO against a reward model; all models share all devices of this machine, and Transformers generates.
# LAUNCHER="python3 -m" trains in one process on one device, without Ray.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

launch train_ppo \
    --pretrain "${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}" \
    --reward_pretrain "${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}" \
    --prompt_data "${PROMPTS:-OpenRLHF/prompt-collection-v0.1}" \
    --input_key "${INPUT_KEY:-context_messages}" \
    --apply_chat_template \
    --max_samples "${MAX_SAMPLES:-100000}" \
    --prompt_max_len "${PROMPT_LEN:-1024}" \
    --generate_max_len "${ANSWER_LEN:-1024}" \
    --rollout_batch_size "${ROLLOUT_BATCH:-1024}" \
    --micro_rollout_batch_size "${MICRO_ROLLOUT_BATCH:-4}" \
    --train_batch_size "${TRAIN_BATCH:-128}" \
    --micro_train_batch_size "${MICRO_BATCH:-2}" \
    --n_samples_per_prompt "${SAMPLES:-1}" \
    --max_epochs 1 \
    --actor_learning_rate 5e-7 \
    --critic_learning_rate 9e-6 \
    --init_kl_coef 0.01 \
    --normalize_reward \
    --param_dtype bf16 \
    --packing_samples \
    --gradient_checkpointing \
    --ref_reward_offload \
    --save_path "${SAVE_PATH:-./checkpoint/llama3-8b-ppo}" \
    --ckpt_path "${CKPT_PATH:-./checkpoint/llama3-8b-ppo-ckpt}" \
    "$@"
