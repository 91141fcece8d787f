#!/usr/bin/env bash
# Another name of train_ppo_with_reward_fn.sh.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_with_reward_fn.sh" "$@"
