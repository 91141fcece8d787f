#!/usr/bin/env bash
# Another name of train_reinforce_baseline_ray_agent_async.sh.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_reinforce_baseline_ray_agent_async.sh" "$@"
