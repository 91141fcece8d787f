#!/usr/bin/env bash
# Distillation: a small model learns the answers and the token distributions of a larger one with the same tokenizer.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

launch train_kd \
    --pretrain "${MODEL:-meta-llama/Llama-3.2-1B}" \
    --teacher_model "${TEACHER:-meta-llama/Meta-Llama-3-8B-Instruct}" \
    --kd_coef 0.4 \
    --dataset "${DATASET:-Open-Orca/OpenOrca}" \
    --input_key "${INPUT_KEY:-question}" \
    --output_key "${OUTPUT_KEY:-response}" \
    --input_template $'User: {}\nAssistant: ' \
    --max_samples "${MAX_SAMPLES:-500000}" \
    --max_len "${MAX_LEN:-2048}" \
    --train_batch_size "${TRAIN_BATCH:-256}" \
    --micro_train_batch_size "${MICRO_BATCH:-2}" \
    --max_epochs 1 \
    --learning_rate 5e-6 \
    --zero_stage 2 \
    --param_dtype bf16 \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-./checkpoint/llama3-1b-kd}" \
    "$@"
