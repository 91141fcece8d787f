#!/usr/bin/env bash
# REINFORCE++-baseline against a reward model, asynchronously: the engines keep generating while the policy trains, and
# importance correction accounts for their older weights. The reward model uses CRITIC_GPUS: there is no critic.
set -euo pipefail

export ACTOR_GPUS=${ACTOR_GPUS:-4} CRITIC_GPUS=${CRITIC_GPUS:-1} ENGINES=${ENGINES:-3} ENGINE_TP=${ENGINE_TP:-1}
export ROLLOUT_BATCH=${ROLLOUT_BATCH:-128} TRAIN_BATCH=${TRAIN_BATCH:-1024} SAMPLES=${SAMPLES:-8}

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_llama_ray.sh" \
    --advantage_estimator reinforce_baseline --async_train --async_queue_size 1 --enable_vllm_is_correction \
    "$@"
