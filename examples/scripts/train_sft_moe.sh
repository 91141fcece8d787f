#!/usr/bin/env bash
# SFT of all weights of a mixture of experts, with the loss that balances the experts.
set -euo pipefail

export MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Base}
export SAVE_PATH=${SAVE_PATH:-./checkpoint/qwen3-moe-sft}

exec "$(dirname "${BASH_SOURCE[0]}")/train_sft.sh" \
    --zero_stage 3 --adam_offload --aux_loss_coef 0.001 \
    "$@"
