#!/usr/bin/env bash
# REINFORCE++ on Ray with devices for each: PPO without a critic, which leaves its devices to the reward model alone.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_llama_ray.sh" \
    --advantage_estimator reinforce \
    "$@"
