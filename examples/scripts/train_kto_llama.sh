#!/usr/bin/env bash
# KTO: single answers with a label, 1 for good and 0 for bad, instead of pairs.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

launch train_kto \
    --pretrain "${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}" \
    --dataset "${DATASET:-Dylan2048/ultrafeedback-unpaired-preferences}" \
    --input_key "${INPUT_KEY:-instruction}" \
    --output_key "${OUTPUT_KEY:-response}" \
    --label_key "${LABEL_KEY:-score}" \
    --input_template $'User: {}\nAssistant: ' \
    --max_len "${MAX_LEN:-2048}" \
    --train_batch_size "${TRAIN_BATCH:-256}" \
    --micro_train_batch_size "${MICRO_BATCH:-4}" \
    --max_epochs 1 \
    --learning_rate 5e-7 \
    --beta 0.1 \
    --zero_stage 3 \
    --param_dtype bf16 \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-./checkpoint/llama3-8b-kto}" \
    "$@"
