#!/usr/bin/env bash
# Process reward model: every step of a solution ends with a placeholder token, at which the model predicts its label.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

launch train_prm \
    --pretrain "${MODEL:-mistralai/Mistral-7B-v0.1}" \
    --dataset "${DATASET:-zhuzilin/Math-Shepherd}" \
    --input_key "${INPUT_KEY:-input}" \
    --label_key "${LABEL_KEY:-value}" \
    --placeholder_token "${PLACEHOLDER:-ки}" \
    --reward_tokens + - \
    --max_len "${MAX_LEN:-8192}" \
    --train_batch_size "${TRAIN_BATCH:-256}" \
    --micro_train_batch_size "${MICRO_BATCH:-8}" \
    --max_epochs 1 \
    --learning_rate 1e-6 \
    --zero_stage 3 \
    --param_dtype bf16 \
    --packing_samples \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-./checkpoint/mistral-7b-prm}" \
    "$@"
