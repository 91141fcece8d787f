#!/usr/bin/env bash
# REINFORCE++ with the hybrid engine: PPO without a critic.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_ray_hybrid_engine.sh" \
    --advantage_estimator reinforce \
    "$@"
