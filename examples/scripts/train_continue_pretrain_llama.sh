#!/usr/bin/env bash
# Continued pre-training: trains on every token of a text, without a template.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

launch train_sft \
    --pretrain_mode \
    --pretrain "${MODEL:-meta-llama/Meta-Llama-3-8B}" \
    --dataset "${DATASET:-wikimedia/wikipedia@20231101.simple}" \
    --input_key "${INPUT_KEY:-text}" \
    --max_samples "${MAX_SAMPLES:-500000}" \
    --max_len "${MAX_LEN:-4096}" \
    --train_batch_size "${TRAIN_BATCH:-256}" \
    --micro_train_batch_size "${MICRO_BATCH:-2}" \
    --max_epochs 1 \
    --learning_rate 5e-6 \
    --zero_stage 2 \
    --param_dtype bf16 \
    --packing_samples \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-./checkpoint/llama3-8b-pretrained}" \
    "$@"
