#!/usr/bin/env bash
# Another name of train_ppo_ray_slurm.sh.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_ray_slurm.sh" "$@"
