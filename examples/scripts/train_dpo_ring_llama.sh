#!/usr/bin/env bash
# DPO on long pairs: RING_SIZE devices share each packed sequence.
set -euo pipefail

export SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-dpo-ring}

exec "$(dirname "${BASH_SOURCE[0]}")/train_dpo_llama.sh" \
    --ring_attn_size "${RING_SIZE:-2}" --ring_head_stride "${RING_STRIDE:-2}" \
    "$@"
