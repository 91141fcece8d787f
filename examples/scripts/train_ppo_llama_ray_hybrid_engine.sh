#!/usr/bin/env bash
# Another name of train_ppo_ray_hybrid_engine.sh.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_ray_hybrid_engine.sh" "$@"
