#!/usr/bin/env bash
# Another name of train_iterative_dpo.sh.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_iterative_dpo.sh" "$@"
