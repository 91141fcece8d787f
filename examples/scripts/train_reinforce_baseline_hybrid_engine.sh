#!/usr/bin/env bash
# REINFORCE++-baseline with the hybrid engine and a reward function: the mean reward of a prompt's samples is the baseline.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_with_reward_fn.sh" \
    --advantage_estimator reinforce_baseline --use_kl_loss --kl_estimator k2 \
    "$@"
