#!/usr/bin/env bash
# REINFORCE++ on Ray with separate devices: PPO without a critic, so the reward model has the devices of both.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_llama_ray.sh" \
    --advantage_estimator reinforce \
    "$@"
