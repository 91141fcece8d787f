#!/usr/bin/env bash
# Another name of train_conditional.sh.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_conditional.sh" "$@"
