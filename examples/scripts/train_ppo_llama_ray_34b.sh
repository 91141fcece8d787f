#!/usr/bin/env bash
# PPO of a 34B model on one node of 8 x 80 GB, optimizer states in host memory. The reward model has a different tokenizer,
# so it scores the text, and the critic starts from the policy.
set -euo pipefail

export MODEL=${MODEL:-codellama/CodeLlama-34b-Instruct-hf}
export ACTOR_GPUS=${ACTOR_GPUS:-4} CRITIC_GPUS=${CRITIC_GPUS:-2} ENGINES=${ENGINES:-1} ENGINE_TP=${ENGINE_TP:-2}
export MICRO_BATCH=${MICRO_BATCH:-1} MICRO_ROLLOUT_BATCH=${MICRO_ROLLOUT_BATCH:-2}
export SAVE_PATH=${SAVE_PATH:-$PWD/checkpoint/codellama-34b-rlhf} CKPT_PATH=${CKPT_PATH:-$PWD/checkpoint/codellama-34b-rlhf-ckpt}

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_llama_ray.sh" \
    --critic_pretrain "${CRITIC_MODEL:-$MODEL}" --adam_offload --ref_reward_offload \
    "$@"
