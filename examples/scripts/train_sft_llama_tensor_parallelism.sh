#!/usr/bin/env bash
# SFT with every matrix split over TENSOR_PARALLEL devices (DeepSpeed AutoTP).
set -euo pipefail

export SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-sft-tp}

exec "$(dirname "${BASH_SOURCE[0]}")/train_sft.sh" \
    --ds_tensor_parallel_size "${TENSOR_PARALLEL:-2}" \
    "$@"
