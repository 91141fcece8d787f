#!/usr/bin/env bash
# Another name of train_rm.sh.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/train_rm.sh" "$@"
