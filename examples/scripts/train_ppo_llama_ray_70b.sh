#!/usr/bin/env bash
# PPO of a 70B model on 48 GPUs of 80 GB: 16 for the policy, 16 for the critic, 16 for the engines.
set -euo pipefail

export MODEL=${MODEL:-meta-llama/Meta-Llama-3-70B-Instruct}
export ACTOR_NODES=${ACTOR_NODES:-2} ACTOR_GPUS=${ACTOR_GPUS:-8} CRITIC_NODES=${CRITIC_NODES:-2} CRITIC_GPUS=${CRITIC_GPUS:-8}
export ENGINES=${ENGINES:-4} ENGINE_TP=${ENGINE_TP:-4}
export MICRO_BATCH=${MICRO_BATCH:-1} MICRO_ROLLOUT_BATCH=${MICRO_ROLLOUT_BATCH:-2}
export SAVE_PATH=${SAVE_PATH:-$PWD/checkpoint/llama3-70b-rlhf} CKPT_PATH=${CKPT_PATH:-$PWD/checkpoint/llama3-70b-rlhf-ckpt}

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_llama_ray.sh" \
    --adam_offload \
    "$@"
